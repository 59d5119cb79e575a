// What becomes of feedback: a line while it waits, then the same question answered before and after.

import { get, writeAnswer } from "./api.js";
import { el, fill, every, button, attempt, badge } from "./dom.js";
import { about, plural } from "./words.js";
import { prose } from "./prose.js";

const POLL_MS = 2000;
const AT_ONCE = 5;

// Follows what waits, with few requests: the newest one by itself, the others by one list.
export class Outcomes {
  constructor() {
    this.waiting = [];
    this.latest = null;
    this.stop = null;
  }

  add(outcome, stored) {
    this.latest = outcome;
    outcome.tell(stored);
    if (outcome.ended) return;
    this.waiting.push(outcome);
    this.stop ??= every(POLL_MS, () => this.look());
  }

  async look() {
    const asked = [...this.waiting]; // others may come meanwhile, which the list does not have
    try {
      const listed = await get("v1/feedback?limit=100");
      const known = new Map(listed.data.map((stored) => [stored.id, stored]));
      for (const outcome of asked) {
        if (!known.has(outcome.id) && !listed.has_more) outcome.erased();
      }
      this.waiting = this.waiting.filter((outcome) => !outcome.ended);
      const newest = this.waiting.at(-1);
      const moved = asked.filter(
        (each) => !each.ended && each !== newest && !waits(known.get(each.id)),
      );
      await Promise.all([newest, ...moved.slice(0, AT_ONCE)].map((outcome) => outcome?.look()));
    } catch {
      return; // the next look may succeed
    }
    this.waiting = this.waiting.filter((outcome) => !outcome.ended);
    if (!this.waiting.length) this.end();
  }

  end() {
    this.stop?.();
    this.stop = null;
  }
}

const waits = (stored) =>
  stored?.samples.some((sample) => ["accepted", "assigned"].includes(sample.state));

export class Outcome {
  constructor(answer, adapter, id) {
    this.answer = answer;
    this.adapter = adapter;
    this.id = id;
    this.ended = false;
    this.line = el("p", { class: "outcome", role: "status" });
    this.comparison = el("div");
    this.element = el("div", {}, this.line, this.comparison);
  }

  // Another feedback about the same answer takes its place.
  drop() {
    this.ended = true;
  }

  async look() {
    try {
      this.tell(await get(`v1/feedback/${this.id}`));
    } catch (error) {
      if (error.status !== 404) throw error;
      this.erased();
    }
  }

  erased() {
    this.say("This feedback was erased.");
    this.ended = true;
  }

  tell({ learning, samples }) {
    if (!learning || this.ended) return;
    this.ended = ["held_out", "learned", "nothing"].includes(learning.state);
    this.say(sentence(this.adapter, learning, samples), learning.state);
    if (learning.state === "learned")
      this.learned(Math.max(...samples.map((sample) => sample.version ?? 0)));
  }

  say(text, state = "") {
    const busy = state === "queued" || state === "training";
    fill(this.line, busy ? el("span", { class: "pulse", "aria-hidden": "true" }) : null, text);
  }

  // A version has learned from this. The newest rated answer is asked again at once, others on demand.
  learned(version) {
    if (this.answer.label === `${this.adapter}@${version}`) return;
    const again = () => this.compare();
    if (this.answer.chat.outcomes.latest === this) again();
    else fill(this.comparison, button(`Answer it again with ${this.adapter}@${version}`, again));
  }

  async compare() {
    const { answer } = this;
    const body = el("div", { class: "text" }, el("span", { class: "caret" }));
    const label = el("span");
    const before = answer.choices[answer.chosen];
    fill(
      this.comparison,
      el(
        "section",
        { class: "comparison", "aria-label": "Before and after" },
        half(
          "Before",
          badge(answer.label, "version"),
          el("div", { class: "text" }, prose(before.text)),
        ),
        half("After", label, body),
      ),
    );
    const asked = { ...answer.asked, model: answer.session.modelOf(this.adapter), store: false };
    let text = "";
    const written = await attempt(() =>
      writeAnswer(asked, undefined, (place, more) => {
        if (place !== answer.chosen) return;
        text += more;
        fill(body, prose(text), el("span", { class: "caret" }));
        answer.chat.follow();
      }),
    );
    fill(body, prose(text));
    if (written) fill(label, badge(written.label, "version good"));
    answer.chat.follow();
  }
}

const half = (title, label, body) =>
  el("div", { class: "half" }, el("div", { class: "row" }, el("h3", {}, title), label), body);

export function sentence(adapter, { state, note, next }, samples) {
  if (state === "queued" && next) {
    const count =
      next.samples < next.enough
        ? `${next.samples} of ${plural(next.enough, "sample")}`
        : plural(next.samples, "sample");
    if (next.takes_s === null)
      return `${count}; learning starts ${next.starts_in_s < 1 ? "now" : `in about ${about(next.starts_in_s)}`}`;
    return `${count}, next version in about ${about(next.starts_in_s + next.takes_s)}`;
  }
  if (state === "training") {
    return `${adapter} learns from ${plural(next.samples, "sample")} now${next.takes_s === null ? "" : `; that takes about ${about(next.takes_s)}`}`;
  }
  if (state === "learned")
    return `${adapter}@${Math.max(...samples.map((sample) => sample.version ?? 0))} learned from this.`;
  if (state === "held_out")
    return "Kept for measuring: versions are measured on it, not trained on it.";
  const told =
    note ?? (state === "queued" ? "It waits for the next version" : "Nothing is learned from it");
  return `${told[0].toUpperCase()}${told.slice(1)}.`;
}
