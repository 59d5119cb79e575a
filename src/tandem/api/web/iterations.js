// The engine's last iterations as a timeline, a lane for each kind of work.

import { download, get } from "./api.js";
import { button, el, every, fill, table } from "./dom.js";
import { chromeTrace, KINDS, pieces } from "./trace.js";
import { number, seconds } from "./words.js";

const POLL_MS = 1000;
const KEPT = 2000;
const LANE = 30;
const TOP = 8;
const AXIS = 22;
const SPANS = [1, 5, 20, 60];

export function iterationsView() {
  const view = new Iterations();
  return { element: view.element, show: () => view.show(), hide: () => view.stop() };
}

class Iterations {
  constructor() {
    this.known = [];
    this.span = 5;
    this.paused = false;
    this.canvas = el("canvas", {
      class: "timeline",
      tabindex: "0",
      role: "img",
      "aria-label": "Timeline of iterations by kind of work. The table below has the numbers.",
      onmousemove: (event) => this.point(event),
      onmouseleave: () => this.tip(null),
      onkeydown: (event) => this.onKey(event),
    });
    this.tooltip = el("div", { class: "tooltip", role: "status", hidden: true });
    this.pause = el(
      "button",
      { type: "button", "aria-pressed": "false", onclick: () => this.toggle() },
      "Pause",
    );
    const span = el(
      "select",
      {
        "aria-label": "Shown time",
        onchange: (event) => {
          this.span = Number(event.target.value);
          this.draw();
        },
      },
      SPANS.map((length) =>
        el("option", { value: String(length), selected: length === this.span }, `last ${length} s`),
      ),
    );
    this.summary = el("p", { class: "muted" });
    this.rows = el("div");
    const lanes = el(
      "div",
      { class: "lanes", "aria-hidden": "true" },
      KINDS.map((kind) => {
        const key = el("i", { class: "key" });
        key.style.background = `var(--${kind.id})`;
        return el("span", {}, key, kind.label);
      }),
    );
    this.element = el(
      "section",
      { class: "page", "aria-label": "Iterations" },
      el(
        "div",
        { class: "heading" },
        el("h1", {}, "Iterations"),
        el("span", { class: "grow" }),
        span,
        this.pause,
        button("Download trace", () => this.save()),
      ),
      this.summary,
      el(
        "div",
        { class: "card timeline-card" },
        lanes,
        el("div", { class: "canvas-wrap" }, this.canvas, this.tooltip),
      ),
      this.rows,
    );
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show() {
    this.stop = every(POLL_MS, () => this.look());
  }

  async look() {
    if (this.paused) return;
    try {
      const last = this.known.at(-1)?.number ?? 0;
      const told = await get(`v1/stats/iterations?limit=${KEPT}${last ? `&after=${last}` : ""}`);
      if (told.iterations < last) this.known = []; // another engine: it counts from 1
      this.known = [...this.known, ...told.data].slice(-KEPT);
      this.draw();
    } catch (error) {
      fill(this.summary, error.message);
    }
  }

  toggle() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    fill(this.pause, this.paused ? "Resume" : "Pause");
  }

  save() {
    download("tandem-trace.json", chromeTrace(this.known));
  }

  onKey(event) {
    if (event.key === " ") {
      event.preventDefault();
      this.toggle();
    }
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const height = TOP + LANE * KINDS.length + AXIS;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const paint = this.canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(
      [...KINDS.map((kind) => kind.id), "line", "muted"].map((name) => [
        name,
        style.getPropertyValue(`--${name}`).trim(),
      ]),
    );
    const last = this.known.at(-1);
    const end = last ? last.started_at + last.seconds : 0;
    this.view = { start: end - this.span, end, width };
    this.axis(paint, colours, width, height);
    const shown = this.known.filter((each) => each.started_at + each.seconds > this.view.start);
    this.drawn = shown.flatMap((iteration) =>
      pieces(iteration).map((piece) => ({ ...piece, iteration })),
    );
    for (const piece of this.drawn) {
      const lane = KINDS.findIndex((kind) => kind.id === piece.kind);
      paint.fillStyle = colours[piece.kind];
      const left = this.x(piece.start);
      paint.fillRect(
        left,
        TOP + lane * LANE + 5,
        Math.max(1, this.x(piece.start + piece.seconds) - left - 0.3),
        LANE - 10,
      );
    }
    this.tell(shown);
  }

  axis(paint, colours, width, height) {
    paint.strokeStyle = colours.line;
    paint.fillStyle = colours.muted;
    paint.font = "11px system-ui, sans-serif";
    for (let lane = 0; lane <= KINDS.length; lane += 1)
      line(paint, 0, TOP + lane * LANE + 0.5, width, TOP + lane * LANE + 0.5);
    const step = this.span / 5;
    for (let place = 0; place <= 5; place += 1) {
      const x = Math.min(width - 0.5, (width * place) / 5 + 0.5);
      line(paint, x, TOP, x, height - AXIS + 4);
      paint.textAlign = place === 0 ? "left" : place === 5 ? "right" : "center";
      paint.fillText(
        place === 5 ? "latest" : `−${number(this.span - place * step, this.span < 5 ? 1 : 0)} s`,
        x,
        height - 5,
      );
    }
  }

  x(time) {
    return ((time - this.view.start) / (this.view.end - this.view.start)) * this.view.width;
  }

  tell(shown) {
    const busy = shown.reduce((sum, each) => sum + each.seconds, 0);
    fill(
      this.summary,
      shown.length
        ? `${number(shown.length)} iterations in the last ${this.span} s, ${seconds(busy / shown.length)} each, busy ${number(Math.min(100, (100 * busy) / this.span))} % of the time.`
        : "No iteration yet. Ask something in the chat, and it shows here.",
    );
    fill(
      this.rows,
      shown.length
        ? table(
            "The last iterations",
            [
              "Iteration",
              "Took",
              "Decode",
              "Prefill",
              "Offline",
              "Learning",
              "Layers back",
              "Updates",
            ],
            shown
              .slice(-12)
              .reverse()
              .map((each) => [
                number(each.number),
                seconds(each.seconds),
                ...["decode", "prefill", "offline", "forward"].map((kind) =>
                  number(each.rows[kind]),
                ),
                number(each.layers),
                number(each.updates),
              ]),
          )
        : null,
    );
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const kind = KINDS[Math.floor((event.clientY - box.top - TOP) / LANE)];
    const near = (piece) =>
      this.x(piece.start) - 2 <= x && x <= this.x(piece.start + piece.seconds) + 2;
    this.tip(
      kind && this.drawn?.findLast((piece) => piece.kind === kind.id && near(piece)),
      kind,
      x,
      event.clientY - box.top,
    );
  }

  tip(piece, kind, x, y) {
    this.tooltip.hidden = !piece;
    if (!piece) return;
    fill(
      this.tooltip,
      el("b", {}, kind.label),
      ` ${seconds(piece.seconds)}`,
      kind.unit ? `, ${number(piece.amount)} ${kind.unit}` : "",
      el("br"),
      `iteration ${number(piece.iteration.number)}, ${seconds(piece.iteration.seconds)}`,
    );
    this.tooltip.style.left = `${Math.min(x + 12, this.view.width - 190)}px`;
    this.tooltip.style.top = `${y + 14}px`;
  }
}

function line(paint, x1, y1, x2, y2) {
  paint.beginPath();
  paint.moveTo(x1, y1);
  paint.lineTo(x2, y2);
  paint.stroke();
}
