// One answer (or two, side by side): its text, who wrote it, what people say of it, what becomes of that.

import { post, writeAnswer } from "./api.js";
import { el, fill, iconButton, button, attempt, badge } from "./dom.js";
import { Outcome } from "./outcome.js";
import { prose } from "./prose.js";

const CUT = { length: "cut at the longest answer" };

export class Answer {
  constructor(chat, adapter, asked) {
    this.chat = chat;
    this.session = chat.session;
    this.adapter = adapter;
    this.asked = asked;
    this.chosen = 0;
    this.choices = Array.from({ length: asked.n }, () => ({ text: "", thought: "" }));
    this.bodies = this.choices.map(() =>
      el("div", { class: "text", "aria-live": "off" }, el("span", { class: "caret" })),
    );
    this.footers = this.choices.map(() => el("div", { class: "footer" }));
    this.cards = this.choices.map((_, place) =>
      el("div", { class: "choice" }, this.bodies[place], this.footers[place]),
    );
    this.below = el("div", { class: "below" });
    this.element = el(
      "div",
      { class: `answer ${asked.n > 1 ? "two" : ""}`, "aria-busy": "true" },
      el("div", { class: "choices" }, this.cards),
      this.below,
    );
  }

  get text() {
    return this.choices[this.chosen].text;
  }

  async write(signal, onGrowth) {
    try {
      const written = await writeAnswer(this.asked, signal, (place, text, thought) => {
        this.choices[place].text += text;
        this.choices[place].thought += thought;
        this.draw(place, true);
        onGrowth();
      });
      this.id = written.id;
      this.label = written.label;
      this.reasons = written.reasons;
      if (written.usage) this.chat.memory.learn(this.asked.messages, written.usage.prompt_tokens);
    } catch (error) {
      this.problem = error.name === "AbortError" ? "Stopped." : error.message;
    }
    this.element.setAttribute("aria-busy", "false");
    this.choices.forEach((_, place) => this.draw(place, false));
    if (this.problem)
      this.below.append(
        el(
          "p",
          { class: this.problem === "Stopped." ? "muted" : "bad", role: "alert" },
          this.problem,
        ),
      );
    else this.cards.forEach((_, place) => this.drawFooter(place));
    onGrowth();
  }

  draw(place, growing) {
    const { text, thought } = this.choices[place];
    fill(
      this.bodies[place],
      thought ? el("details", { class: "thought" }, el("summary", {}, "Reasoning"), thought) : null,
      prose(text),
      growing ? el("span", { class: "caret" }) : null,
    );
  }

  // Of two answers that say the same, none is better.
  get differ() {
    return new Set(this.choices.map((choice) => choice.text.trim())).size > 1;
  }

  get mayRate() {
    return this.session.mayTeach && (this.adapter === "" || this.session.mayTrain(this.adapter));
  }

  drawFooter(place) {
    const version = badge(this.label, "version");
    version.title = "The version that wrote this answer";
    const cut = CUT[this.reasons[place]];
    const tools = el("div", { class: "row tools" });
    if (this.mayRate && this.differ) {
      const better = el(
        "button",
        { type: "button", class: "small", onclick: () => this.prefer(place) },
        "This one is better",
      );
      tools.append(better);
    }
    if (this.mayRate) {
      const thumb = (name, label, rating) =>
        iconButton(name, label, (event) => this.rate(place, rating, event.currentTarget), {
          "aria-pressed": "false",
        });
      tools.append(
        thumb("up", "Good answer", true),
        thumb("down", "Bad answer", false),
        iconButton("edit", "This is how it should be", () => this.correct(place)),
      );
    }
    tools.append(
      iconButton("copy", "Copy", () =>
        attempt(() => navigator.clipboard.writeText(this.choices[place].text)),
      ),
    );
    fill(
      this.footers[place],
      version,
      cut ? el("span", { class: "muted" }, cut) : null,
      this.forgets ? el("span", { class: "muted" }, "without the oldest messages") : null,
      el("span", { class: "grow" }),
      tools,
    );
  }

  async rate(place, rating, pressed) {
    const sent = await this.say({ choice: place, rating });
    if (!sent) return;
    for (const each of this.footers[place].querySelectorAll("[aria-pressed]")) {
      each.setAttribute("aria-pressed", String(each === pressed));
    }
  }

  async prefer(place) {
    const sent = await this.say({ preference: { chosen: place, rejected: 1 - place } });
    if (!sent) return;
    this.chosen = place;
    this.cards.forEach((card, each) => {
      card.classList.toggle("preferred", each === place);
      card.classList.toggle("rejected", each !== place);
    });
    for (const footer of this.footers) footer.querySelector(".small")?.remove();
    this.footers[place].prepend(badge("better", "good"));
  }

  correct(place) {
    if (this.editing) return;
    const field = el("textarea", { "aria-label": "How the answer should be", rows: "4" });
    field.value = this.choices[place].text.trim();
    const close = () => {
      this.editing.remove();
      this.editing = null;
    };
    this.editing = el(
      "form",
      {
        class: "correction",
        onsubmit: async (event) => {
          event.preventDefault();
          const text = field.value.trim();
          if (text && (await this.say({ choice: place, demonstration: text }))) {
            this.choices[place].corrected = text;
            close();
          }
        },
      },
      el("label", { class: "field" }, el("span", {}, "This is how it should be"), field),
      el(
        "div",
        { class: "row end" },
        button("Cancel", close),
        el("button", { type: "submit", class: "primary" }, "Teach it"),
      ),
    );
    this.cards[place].append(this.editing);
    field.focus();
  }

  // Send feedback about this answer and follow what becomes of it. True if it was taken.
  async say(said) {
    const pupil = await this.chat.pupilOf(this.adapter);
    if (!pupil) return false;
    const body = { completion_id: this.id, adapter: pupil, ...said };
    if (this.asked.n === 1 || body.preference) delete body.choice;
    const stored = await attempt(() => post("v1/feedback", body));
    if (!stored) return false;
    this.outcome?.drop();
    this.outcome = new Outcome(this, pupil, stored.id);
    fill(this.below, this.outcome.element);
    this.chat.outcomes.add(this.outcome, stored);
    this.chat.follow();
    return true;
  }
}
