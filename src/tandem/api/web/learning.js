// Learning: for each adapter its versions, what the gate measured and said, its samples, and its history.

import { get, post, remove } from "./api.js";
import { ask, attempt, badge, button, el, empty, every, fill, notice, table } from "./dom.js";
import { Chart, Parts } from "./charts.js";
import { number, percent, plural, short, when } from "./words.js";

const POLL_MS = 3000;
const STATES = [
  ["accepted", "new", "decode"],
  ["assigned", "in training", "offline"],
  ["consumed", "learned", "good"],
  ["refused", "refused", "danger"],
  ["invalid", "not usable", "muted"],
];
const KINDS = { published: "good", candidate: "wait", refused: "danger" };

export function learningView(session) {
  const view = new Learning(session);
  return { element: view.element, show: () => view.show(), hide: () => view.stop() };
}

class Learning {
  constructor(session) {
    this.session = session;
    this.name = "";
    this.choice = el("select", {
      "aria-label": "Adapter",
      onchange: () => {
        this.name = this.choice.value;
        this.seen = "";
        this.look();
      },
    });
    this.head = el("div", { class: "heading" });
    this.body = el("div");
    this.element = el(
      "section",
      { class: "page", "aria-label": "Learning" },
      el(
        "div",
        { class: "heading" },
        el("h1", {}, "Learning"),
        el("span", { class: "grow" }),
        this.choice,
      ),
      this.body,
    );
    const versions = (label, colour, more = {}) => ({ label, colour, points: true, ...more });
    this.charts = {
      loss: new Chart("Training loss", [versions("loss", "decode")], { format: short }),
      wins: new Chart(
        "Held-out win rate",
        [versions("version", "decode"), versions("before", "muted", { dash: [5, 4] })],
        { format: percent, range: () => [0, 1.04] },
      ),
      clpd: new Chart(
        "Held-out CLPD",
        [versions("version", "decode"), versions("before", "muted", { dash: [5, 4] })],
        { format: short },
      ),
      quality: new Chart(
        "Quality on canary prompts",
        [versions("quality drop", "decode"), versions("divergence", "offline")],
        { format: short },
      ),
    };
    this.samples = new Parts("Samples to learn from", (value) => number(value));
    this.heldOut = new Parts("Samples to measure on", (value) => number(value));
    this.versions = el("div", { class: "card flush" });
    this.history = el("ol", { class: "history card" });
    this.details = el(
      "div",
      {},
      this.head,
      el("div", { class: "grid halves" }, this.samples.element, this.heldOut.element),
      el(
        "div",
        { class: "grid" },
        Object.values(this.charts).map((chart) => chart.element),
      ),
      el("h2", {}, "Versions"),
      this.versions,
      el("h2", {}, "History"),
      this.history,
    );
  }

  show() {
    this.seen = "";
    this.stop = every(POLL_MS, () => this.look());
  }

  may(adapter) {
    return this.session.admin || this.session.mayServe(adapter) || this.session.mayTrain(adapter);
  }

  async look() {
    await attempt(async () => {
      const listed = (await get("v1/adapters")).data.filter((adapter) => this.may(adapter.id));
      const names = listed.map((adapter) => adapter.id);
      this.choice.hidden = !names.length;
      if (!names.length) {
        fill(
          this.body,
          empty(
            "No adapter yet",
            "Rate an answer in the chat, and name the adapter that shall learn from it.",
          ),
        );
        return;
      }
      if (!names.includes(this.name))
        this.name = listed.find((adapter) => adapter.learning)?.id ?? names[0];
      if (this.choice.childElementCount !== names.length)
        fill(
          this.choice,
          names.map((name) => el("option", { value: name }, name)),
        );
      this.choice.value = this.name;
      const adapter = listed.find((each) => each.id === this.name);
      if (!adapter.learning) {
        fill(
          this.body,
          empty(
            `${adapter.label} does not learn`,
            "It was loaded from files. The first feedback about it makes it learn.",
          ),
        );
        return;
      }
      const path = `v1/adapters/${encodeURIComponent(this.name)}`;
      const [versions, events] = await Promise.all([
        get(`${path}/versions`),
        get(`${path}/events?limit=30`),
      ]);
      this.draw(adapter, versions.data, events.data);
    });
  }

  draw(adapter, versions, events) {
    const seen = JSON.stringify([adapter, versions, events]);
    if (seen === this.seen) return;
    this.seen = seen;
    if (this.details.parentNode !== this.body) fill(this.body, this.details);
    const { session } = this;
    fill(
      this.head,
      el(
        "div",
        { class: "answers" },
        el("span", { class: "muted" }, "Answers now"),
        badge(adapter.label, "version big"),
      ),
      el("span", { class: "grow" }),
      session.admin && adapter.version
        ? button("Roll back …", () => this.rollBack(adapter, versions))
        : null,
      session.mayTrain(adapter.id)
        ? button("Erase feedback …", () => this.erase(adapter), "danger-quiet")
        : null,
    );
    const { samples } = adapter.learning;
    for (const [parts, split] of [
      [this.samples, "train"],
      [this.heldOut, "held_out"],
    ]) {
      parts.set(
        STATES.map(([state, label, colour]) => ({
          label,
          value: samples[split]?.[state] ?? 0,
          colour,
        })).filter(({ value }, place) => value || place < 3),
      );
    }
    const measured = [...versions].reverse();
    const column = (name) => measured.map((version) => version.metrics[name] ?? null);
    const x = measured.map((version) => version.version);
    this.charts.loss.set([x, column("loss")]);
    this.charts.wins.set([x, column("win_rate"), column("win_rate_before")]);
    this.charts.clpd.set([x, column("clpd"), column("clpd_before")]);
    this.charts.quality.set([x, column("canary_quality_drop"), column("canary_divergence")]);
    const rows = versions.map((version) => [
      el(
        "span",
        { class: "row tight" },
        badge(version.label, "version"),
        version.current ? badge("answers", "good") : null,
        version.tainted ? badge("tainted", "wait") : null,
      ),
      badge(version.state, KINDS[version.state]),
      when(version.created_at),
      version.parent ? `@${version.parent}` : "base",
      number(version.metrics.samples),
      short(version.metrics.loss),
      percent(version.metrics.win_rate),
      version.reason ?? "",
      this.actions(adapter, version),
    ]);
    const columns = [
      "Version",
      "State",
      "Made",
      "From",
      "Samples",
      "Loss",
      "Win rate",
      "What the gate said",
      "",
    ];
    fill(
      this.versions,
      versions.length
        ? table("Versions", columns, rows, "versions")
        : el(
            "p",
            { class: "muted pad" },
            "None yet. A version is made when there are enough samples.",
          ),
    );
    fill(
      this.history,
      events.length
        ? events.map((event) =>
            el(
              "li",
              { class: event.level },
              el("time", {}, when(event.created_at)),
              el("span", {}, event.message),
            ),
          )
        : el("li", {}, el("span", { class: "muted" }, "Nothing has happened yet.")),
    );
  }

  actions(adapter, version) {
    if (!this.session.admin) return null;
    const path = `v1/adapters/${encodeURIComponent(adapter.id)}/versions/${version.version}`;
    const act = (what, done) =>
      attempt(async () => {
        await post(`${path}/${what}`);
        notice(`${version.label} ${done}.`);
        await this.look();
      });
    const row = el("span", { class: "row tight" });
    if (!version.current)
      row.append(
        button(
          version.state === "candidate" ? "Publish" : "Let it answer",
          () => act("publish", "answers now"),
          "small",
        ),
      );
    if (version.state === "candidate")
      row.append(button("Refuse", () => act("refuse", "is refused"), "small"));
    return row;
  }

  async rollBack(adapter, versions) {
    const current = versions.find((version) => version.current);
    const earlier = versions.filter((version) => !version.current && version.state === "published");
    const node = el(
      "select",
      {},
      [
        ...earlier.map((version) => [
          String(version.version),
          `${version.label}, made ${when(version.created_at)}`,
        ]),
        ["0", "the base model"],
      ].map(([value, label]) =>
        el("option", { value, selected: value === String(current?.parent ?? 0) }, label),
      ),
    );
    const given = await ask({
      title: `Roll back ${adapter.label}?`,
      text: "Requests that run finish as they began. What was being trained is given up.",
      fields: [{ name: "version", label: "Answer again with", node }],
      action: "Roll back",
      danger: true,
    });
    if (!given) return;
    await attempt(async () => {
      const { version } = await post(`v1/adapters/${encodeURIComponent(adapter.id)}/rollback`, {
        version: Number(given.version),
      });
      notice(
        version
          ? `${adapter.id}@${version} answers now.`
          : `${adapter.id} answers as the base model does.`,
      );
      await this.look();
    });
  }

  async erase(adapter) {
    const fields = [{ name: "user", label: "Only of this user (empty: of everybody)" }];
    if (this.session.admin && this.session.required) {
      fields.push({
        name: "keys",
        label: "Whose",
        node: el(
          "select",
          {},
          el("option", { value: "" }, "what this key sent"),
          el("option", { value: "all" }, "what all keys sent"),
        ),
      });
    }
    const given = await ask({
      title: `Erase the feedback about ${adapter.id}?`,
      text: "This cannot be undone. Versions that learned from it stay and are marked as tainted; roll back if they shall not answer.",
      fields,
      action: "Erase",
      danger: true,
    });
    if (!given) return;
    const query = new URLSearchParams({ adapter: adapter.id });
    for (const name of ["user", "keys"]) if (given[name]) query.set(name, given[name]);
    await attempt(async () => {
      const erased = await remove(`v1/feedback?${query}`);
      notice(
        `${plural(erased.feedback, "feedback", "feedbacks")} and ${plural(erased.samples, "sample")} are erased.`,
      );
      await this.look();
    });
  }
}
