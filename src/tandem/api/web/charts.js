// Lines over time or versions (uPlot), and bars of parts of a whole. Colours are the style sheet's.

import { el, fill } from "./dom.js";
import { percent } from "./words.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// `series` are { label, colour, dash, points }; `format` shows a value. The first row of data is x: times in
// seconds of which the last `overTime` are shown, or versions. `whole`: values are counts.
export class Chart {
  constructor(
    title,
    series,
    { format = String, overTime = 0, whole = false, height = 170, range } = {},
  ) {
    this.options = { series, format, overTime, whole, height, range };
    this.data = [[], ...series.map(() => [])];
    this.nothing = el("p", { class: "nothing" }, "nothing measured yet");
    this.plot = el("div", { class: "plot" }, this.nothing);
    this.element = el("figure", { class: "chart card" }, el("figcaption", {}, title), this.plot);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.plot);
    this.rebuild = () => this.build();
    dark.addEventListener("change", this.rebuild);
  }

  set(data) {
    this.data = data;
    this.nothing.hidden = data.slice(1).some((row) => row.some((value) => value !== null));
    if (this.chart) this.chart.setData(data);
    else this.fit();
  }

  fit() {
    const width = this.plot.clientWidth;
    if (!width) return;
    if (this.chart) this.chart.setSize({ width, height: this.options.height });
    else this.build();
  }

  build() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.chart?.destroy();
    const { series, format, overTime, whole, height, range } = this.options;
    const version = (x) => (this.data[0].includes(x) ? `@${x}` : "");
    const axis = {
      stroke: colour("muted"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
    };
    const xAxis = overTime
      ? { ...axis, size: 30, space: 80, values: (_, found) => found.map(clock) }
      : { ...axis, size: 30, space: 40, incrs: COUNTS, values: (_, found) => found.map(version) };
    const lines = series.map(({ label, colour: name, dash, points }) => ({
      label,
      stroke: colour(name),
      width: 2,
      dash,
      points: { show: points ?? false, size: 6, fill: colour(name) },
      value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
      spanGaps: true,
    }));
    const x = {
      label: overTime ? "at" : "version",
      value: (_, value) => (value === null ? "–" : overTime ? clock(value) : version(value)),
    };
    this.chart = new window.uPlot(
      {
        width,
        height,
        scales: {
          x: overTime
            ? { time: true, range: (_, least, most) => [(most ?? 0) - overTime, most ?? 0] }
            : { time: false, range: widened },
          y: { range: range ?? aboveZero },
        },
        axes: [
          xAxis,
          {
            ...axis,
            size: 56,
            space: 34,
            ...(whole ? { incrs: COUNTS } : {}),
            values: (_, found) => found.map(format),
          },
        ],
        series: [x, ...lines],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
        legend: { live: true },
      },
      this.data,
      this.plot,
    );
  }
}

const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const clock = (at) =>
  new Date(at * 1000).toLocaleTimeString(undefined, {
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    hour12: false,
  });
const widened = (_, least, most) => [(least ?? 0) - 0.5, (most ?? 1) + 0.5];

function aboveZero(_, least, most) {
  if (least === null || most === null) return [0, 1];
  const low = Math.min(0, least);
  return [low, most > low ? most + 0.08 * (most - low) : low + 1];
}

// A whole of parts { label, value, colour }: one bar and its legend.
export class Parts {
  constructor(title, format = percent) {
    this.format = format;
    this.bar = el("div", { class: "parts-bar", "aria-hidden": "true" });
    this.legend = el("ul", { class: "parts-legend" });
    this.element = el(
      "figure",
      { class: "card" },
      el("figcaption", {}, title),
      this.bar,
      this.legend,
    );
  }

  set(parts) {
    const total = parts.reduce((sum, part) => sum + part.value, 0);
    while (this.bar.children.length < parts.length) this.bar.append(el("span"));
    parts.forEach((part, place) => {
      const piece = this.bar.children[place];
      piece.style.width = total ? `${(100 * part.value) / total}%` : "0";
      piece.style.background = `var(--${part.colour})`;
    });
    fill(
      this.legend,
      parts.map((part) => {
        const key = el("i", { class: "key" });
        key.style.background = `var(--${part.colour})`;
        return el(
          "li",
          {},
          key,
          el("span", {}, part.label),
          el(
            "b",
            {},
            total || this.format !== percent
              ? this.format(this.format === percent ? part.value / total : part.value)
              : "–",
          ),
        );
      }),
    );
  }
}
