// What goes on: load, latencies against the objectives, where the time and the memory go.

import { text } from "./api.js";
import { el, fill, every } from "./dom.js";
import { Chart, Parts } from "./charts.js";
import { parse, Scrapes } from "./prometheus.js";
import { bytes, number, percent, seconds, short } from "./words.js";

const POLL_MS = 2000;
const WINDOW_S = 60;
const SHOWN_S = 300;
const WORK = [
  ["decode", "Decode"],
  ["prefill", "Prefill"],
  ["offline", "Offline"],
  ["forward", "Learning, forward"],
  ["backward", "Learning, backward"],
  ["host", "Deciding and the rest"],
];
const HELD = [
  ["online", "Online", "decode"],
  ["offline", "Offline", "offline"],
  ["learning", "Learning", "forward"],
];
const MEMORY = [
  "decode",
  "backward",
  "host",
  "prefill",
  "offline",
  "forward",
  "learning",
  "muted",
  "line",
  "accent",
];

export function nowView(session) {
  const view = new Now(session);
  return { element: view.element, show: () => view.show(), hide: () => view.stop?.() };
}

class Now {
  constructor(session) {
    this.session = session;
    this.scrapes = new Scrapes(WINDOW_S);
    this.points = [];
    this.tiles = el("dl", { class: "tiles" });
    this.state = el("p", { class: "muted", role: "status" });
    this.speed = new Chart(
      "Tokens per second",
      [
        { label: "generated", colour: "decode" },
        { label: "of prompts", colour: "prefill" },
      ],
      { overTime: SHOWN_S, format: short },
    );
    this.load = new Chart(
      "Choices",
      [
        { label: "running", colour: "decode" },
        { label: "waiting", colour: "offline" },
      ],
      { overTime: SHOWN_S, whole: true, format: number },
    );
    this.work = new Parts("Where the time of iterations went, last minute");
    this.blocks = new Parts("KV blocks", (value) => number(value));
    this.memory = new Parts("Memory by holder", bytes);
    this.element = el(
      "section",
      { class: "page", "aria-label": "Now" },
      el("h1", {}, "Now"),
      this.state,
      this.tiles,
      el(
        "div",
        { class: "grid" },
        this.speed.element,
        this.load.element,
        this.work.element,
        this.blocks.element,
        this.memory.element,
      ),
    );
    this.draw();
  }

  show() {
    this.stop = every(POLL_MS, () => this.look());
  }

  async look() {
    try {
      this.scrapes.add(Date.now() / 1000, parse(await text("metrics")));
    } catch (error) {
      fill(this.state, error.message);
      return;
    }
    const { scrapes } = this;
    const engines = Object.entries(scrapes.by("tandem_engine_up", "engine"));
    const away = engines.filter(([, up]) => !up).map(([name]) => name);
    const which = engines.length > 1 ? `${away.join(" and ")} ` : "";
    fill(this.state, away.length ? `The ${which}engine is not there just now.` : "");
    const at = scrapes.kept.at(-1).at;
    if (scrapes.kept.length > 1) {
      this.points.push([
        at,
        scrapes.rate("tandem_generation_tokens_total", {}, 5),
        scrapes.rate("tandem_prompt_tokens_total", {}, 5),
        scrapes.value("tandem_num_requests_running"),
        scrapes.value("tandem_num_requests_waiting"),
      ]);
    }
    while (this.points.length && this.points[0][0] < at - SHOWN_S) this.points.shift();
    this.draw();
  }

  draw() {
    const { scrapes, session, points } = this;
    const slo = "tandem_slo_choices_total";
    const met = scrapes.growth(slo, { met: "both" });
    const judged = scrapes.growth(slo).amount - scrapes.growth(slo, { met: "left" }).amount;
    const hits = scrapes.growth("tandem_prefix_cache_hits_total").amount;
    const asked = scrapes.growth("tandem_prefix_cache_queries_total").amount;
    const latency = (name, objective) =>
      ["p50", "p95"].map((label, place) => {
        const value = scrapes.quantile(name, place ? 0.95 : 0.5);
        return { label, text: seconds(value), late: value !== null && value > objective };
      });
    fill(
      this.tiles,
      tile(
        "Running",
        number(scrapes.value("tandem_num_requests_running")),
        `${number(scrapes.value("tandem_num_requests_waiting"))} waiting`,
      ),
      tile(
        "Generated",
        short(scrapes.rate("tandem_generation_tokens_total", {}, 10)),
        "tokens/s, last 10 s",
      ),
      tile(
        "Time to first token",
        ...measured(
          latency("tandem_time_to_first_token_seconds", session.ttft_slo),
          session.ttft_slo,
        ),
      ),
      tile(
        "Time per token",
        ...measured(
          latency("tandem_request_time_per_output_token_seconds", session.tpot_slo),
          session.tpot_slo,
        ),
      ),
      tile(
        "Goodput",
        `${short(met.seconds ? met.amount / met.seconds : 0)}\u00a0/s`,
        judged > 0
          ? `${percent(met.amount / judged)} of choices met both objectives`
          : "no choice in the last minute",
      ),
      tile("Prefix cache", asked > 0 ? percent(hits / asked) : "–", "of prompt tokens found"),
    );
    this.speed.set([0, 1, 2].map((column) => points.map((point) => point[column])));
    this.load.set([0, 3, 4].map((column) => points.map((point) => point[column])));
    const spent = scrapes.growthBy("tandem_work_seconds_total", "work");
    this.work.set(WORK.map(([work, label]) => ({ label, value: spent[work] ?? 0, colour: work })));
    const held = scrapes.by("tandem_kv_blocks_held", "work_class");
    const cached = scrapes.value("tandem_kv_blocks_cached");
    const all = scrapes.value("tandem_kv_blocks");
    const used = scrapes.value("tandem_kv_blocks_used");
    this.blocks.set([
      ...HELD.map(([name, label, colour]) => ({ label, value: held[name] ?? 0, colour })),
      { label: "Cached for reuse", value: cached, colour: "muted" },
      { label: "Free", value: Math.max(0, all - used - cached), colour: "line" },
    ]);
    const memory = Object.entries(scrapes.by("tandem_memory_bytes", "purpose")).filter(
      ([, value]) => value > 0,
    );
    this.memory.set(
      memory
        .sort((a, b) => b[1] - a[1])
        .map(([purpose, value], place) => ({
          label: purpose.replaceAll("_", " "),
          value,
          colour: MEMORY[place % MEMORY.length],
        })),
    );
  }
}

function measured(values, objective) {
  const [half, most] = values;
  return [
    el(
      "span",
      {},
      el("span", { class: half.late ? "bad" : "" }, half.text),
      el("small", {}, " median"),
    ),
    el(
      "span",
      {},
      "95 %: ",
      el("span", { class: most.late ? "bad" : "" }, most.text),
      el("br"),
      `objective: ${seconds(objective)}`,
    ),
  ];
}

const tile = (name, value, note) =>
  el(
    "div",
    { class: "tile card" },
    el("dt", {}, name),
    el("dd", { class: "value" }, value),
    el("dd", { class: "note" }, note),
  );
