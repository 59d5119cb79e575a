// Chat: questions, streamed answers with who wrote them, and what people think of them.

import { get } from "./api.js";
import { el, fill, icon, iconButton, ask, attempt, notice } from "./dom.js";
import { Answer } from "./answer.js";
import { Memory } from "./memory.js";
import { Outcomes } from "./outcome.js";
import { chatSettings } from "./settings.js";

const NAME = "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}";

export function chatView(session) {
  const chat = new Chat(session);
  return { element: chat.element, show: () => chat.show(), hide: () => {} };
}

class Chat {
  constructor(session) {
    this.session = session;
    this.turns = []; // { text, answer }
    this.outcomes = new Outcomes();
    this.memory = new Memory(session.max_model_len);
    this.adapter = "";
    this.settings = {
      temperature: 0.7,
      tokens: Math.min(256, session.max_model_len >> 1),
      system: "",
    };
    this.models = el("select", {
      "aria-label": "Model",
      onchange: () => this.choose(this.models.value),
    });
    this.two = el(
      "button",
      {
        type: "button",
        class: "quiet toggle",
        "aria-pressed": "false",
        title: "Get two answers and choose",
        onclick: () => this.two.setAttribute("aria-pressed", String(!this.wantsTwo)),
      },
      icon("columns"),
      el("span", {}, "Two answers"),
    );
    this.list = el("ol", { class: "turns", "aria-label": "Conversation" });
    this.input = el("textarea", {
      rows: "1",
      placeholder: "Ask something",
      "aria-label": "Message",
      oninput: () => this.grow(),
      onkeydown: (event) => this.onKey(event),
    });
    this.action = el(
      "button",
      { type: "submit", class: "primary square", "aria-label": "Send" },
      icon("send"),
    );
    this.composer = el(
      "form",
      {
        class: "composer",
        onsubmit: (event) => {
          event.preventDefault();
          this.send();
        },
      },
      this.input,
      this.action,
    );
    const fresh = iconButton("plus", "New conversation", () => this.clear());
    const settings = iconButton("settings", "Settings of answers", () => this.configure());
    this.scroller = el("div", { class: "chat-scroll" });
    this.element = el(
      "section",
      { class: "chat", "aria-label": "Chat" },
      el(
        "div",
        { class: "toolbar" },
        el(
          "div",
          { class: "inner" },
          this.models,
          this.two,
          el("span", { class: "grow" }),
          settings,
          fresh,
        ),
      ),
      this.scroller,
      el("div", { class: "composer-wrap" }, this.composer),
    );
    this.clear();
  }

  get wantsTwo() {
    return this.two.getAttribute("aria-pressed") === "true";
  }

  show() {
    attempt(() => this.loadModels());
    this.input.focus({ preventScroll: true });
  }

  async loadModels() {
    const listed = (await get("v1/models")).data;
    const names = listed.map((model) => model.id.slice(this.session.model.length + 1));
    this.names = names.filter((name) => this.session.mayServe(name));
    if (this.adapter && !this.names.includes(this.adapter)) this.names.push(this.adapter);
    if (!this.names.includes(this.adapter)) this.adapter = this.names[0] ?? "";
    const options = this.names.map((name) =>
      el(
        "option",
        { value: name, selected: name === this.adapter },
        name ? `${this.session.model}:${name}` : this.session.model,
      ),
    );
    if (this.session.mayTeach && this.session.auto_adapters)
      options.push(el("option", { value: "+" }, "New adapter …"));
    fill(this.models, options);
    this.models.value = this.adapter;
  }

  async choose(value) {
    if (value === "+") {
      this.models.value = this.adapter;
      value = await this.newAdapter(
        "A name for the adapter. It answers as the base model does until it has learned.",
      );
    }
    if (value !== null) await this.use(value);
  }

  async use(adapter) {
    this.adapter = adapter;
    await attempt(() => this.loadModels());
  }

  // The adapter that shall learn from what is said about an answer of `adapter`; null if none.
  async pupilOf(adapter) {
    const pupil = adapter || this.adapter;
    if (pupil && this.session.mayTrain(pupil)) return pupil;
    const name = await this.newAdapter(
      "The base model itself does not learn. Which adapter shall learn from what you say?",
    );
    if (name) await this.use(name);
    return name;
  }

  async newAdapter(text) {
    const known = (this.names ?? []).filter((name) => name && this.session.mayTrain(name));
    const list = el(
      "datalist",
      { id: "known-adapters" },
      known.map((name) => el("option", { value: name })),
    );
    const node = el("input", {
      autocomplete: "off",
      required: true,
      pattern: NAME,
      maxlength: "64",
      list: "known-adapters",
      value: known[0] ?? "mine",
      title: "Letters, digits, dots, dashes, underscores",
    });
    const field = { name: "adapter", label: "Adapter", node: el("span", {}, node, list) };
    node.name = "adapter";
    const given = await ask({
      title: "Choose an adapter",
      text,
      fields: [field],
      action: "Use it",
    });
    if (!given?.adapter) return null;
    if (!this.session.mayTrain(given.adapter)) {
      notice(`This key may not teach '${given.adapter}'.`, "bad");
      return null;
    }
    return given.adapter;
  }

  clear() {
    this.abort?.abort();
    this.outcomes.end();
    this.outcomes = new Outcomes();
    this.turns = [];
    fill(this.list);
    fill(
      this.scroller,
      el(
        "div",
        { class: "welcome" },
        el("h1", {}, "What would you like to know?"),
        el(
          "p",
          { class: "muted" },
          this.session.mayTeach
            ? "Rate an answer, choose the better of two, or write how it should be: the model learns from it while it goes on answering."
            : "Answers are written by the model that you choose above.",
        ),
      ),
    );
  }

  async configure() {
    const changed = await chatSettings(this.settings);
    if (changed) this.settings = changed;
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 200)}px`;
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.abort) this.send();
    }
  }

  messagesBefore(turn) {
    const before = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    for (const each of this.turns) {
      before.push({ role: "user", content: each.text });
      if (each === turn) break;
      before.push({ role: "assistant", content: each.answer.text });
    }
    return before;
  }

  async send() {
    if (this.abort) return this.abort.abort();
    const text = this.input.value.trim();
    if (!text) return undefined;
    this.input.value = "";
    this.grow();
    if (!this.turns.length) fill(this.scroller, this.list);
    const turn = { text };
    this.turns.push(turn);
    const messages = this.messagesBefore(turn);
    const asked = {
      model: this.session.modelOf(this.adapter),
      messages: this.memory.fitting(messages, this.settings.tokens),
      temperature: this.settings.temperature,
      max_tokens: this.settings.tokens,
      seed: Math.floor(Math.random() * 2 ** 31),
      n: this.wantsTwo ? 2 : 1,
    };
    turn.answer = new Answer(this, this.adapter, asked);
    turn.answer.forgets = asked.messages.length < messages.length;
    const item = el("li", {}, el("div", { class: "question" }, text), turn.answer.element);
    this.list.append(item);
    item.scrollIntoView({ block: "start" });
    this.busy(new AbortController());
    try {
      await turn.answer.write(this.abort.signal, () => this.follow());
    } finally {
      this.busy(null);
    }
    if (!turn.answer.text) this.turns.splice(this.turns.indexOf(turn), 1);
    return undefined;
  }

  busy(controller) {
    this.abort = controller;
    this.action.setAttribute("aria-label", controller ? "Stop" : "Send");
    fill(this.action, icon(controller ? "stop" : "send"));
  }

  // Stay at the end while an answer grows, unless the reader has scrolled up.
  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    if (scrollHeight - scrollTop - clientHeight < 120) this.scroller.scrollTop = scrollHeight;
  }
}
