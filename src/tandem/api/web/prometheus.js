// Prometheus' text format, and what can be said of two scrapes: rates, and quantiles of histograms.

const LINE = /^([a-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/i;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Samples by name: [{ labels, value }].
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(LABEL)].map((each) => [each[1], each[2]]),
    );
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3].replace("Inf", "Infinity")) });
  }
  return found;
}

export class Scrapes {
  constructor(seconds) {
    this.seconds = seconds;
    this.kept = []; // { at, samples }
  }

  add(at, samples) {
    // The engine's counters begin anew when its process does: older scrapes tell nothing then.
    const last = this.kept.at(-1);
    if (
      last &&
      total(samples, "tandem_iterations_total") < total(last.samples, "tandem_iterations_total")
    )
      this.kept = [];
    this.kept.push({ at, samples });
    while (this.kept.length > 2 && this.kept[0].at < at - this.seconds) this.kept.shift();
  }

  get latest() {
    return this.kept.at(-1)?.samples ?? new Map();
  }

  value(name, labels = {}) {
    return total(this.latest, name, labels);
  }

  // By the values of a label, summed over other labels, such as the engine.
  by(name, label) {
    return Object.fromEntries(
      (this.latest.get(name) ?? []).map(({ labels }) => [
        labels[label],
        this.value(name, { [label]: labels[label] }),
      ]),
    );
  }

  // How much a counter grew over the last `seconds` of what is kept, and over how many.
  growth(name, labels = {}, seconds = this.seconds) {
    const [first, last] = this.ends(seconds);
    if (!first) return { amount: 0, seconds: 0 };
    return {
      amount: Math.max(0, total(last.samples, name, labels) - total(first.samples, name, labels)),
      seconds: last.at - first.at,
    };
  }

  rate(name, labels, seconds) {
    const grown = this.growth(name, labels, seconds);
    return grown.seconds ? grown.amount / grown.seconds : 0;
  }

  growthBy(name, label, seconds = this.seconds) {
    return Object.fromEntries(
      (this.latest.get(name) ?? []).map(({ labels }) => [
        labels[label],
        this.growth(name, { [label]: labels[label] }, seconds).amount,
      ]),
    );
  }

  // A quantile of what was observed meanwhile, within its bucket in proportion; null without any.
  quantile(name, share) {
    const [first, last] = this.ends(this.seconds);
    if (!first) return null;
    const before = new Map(
      (first.samples.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [labels.le, value]),
    );
    const buckets = (last.samples.get(`${name}_bucket`) ?? [])
      .map(({ labels, value }) => ({
        le: Number(labels.le.replace("+Inf", "Infinity")),
        count: value - (before.get(labels.le) ?? 0),
      }))
      .sort((a, b) => a.le - b.le);
    const all = buckets.at(-1)?.count ?? 0;
    if (!all) return null;
    const wanted = share * all;
    let below = { le: 0, count: 0 };
    for (const bucket of buckets) {
      if (bucket.count >= wanted) {
        if (bucket.le === Infinity) return below.le;
        return (
          below.le +
          ((bucket.le - below.le) * (wanted - below.count)) / (bucket.count - below.count || 1)
        );
      }
      below = bucket;
    }
    return below.le;
  }

  ends(seconds) {
    const last = this.kept.at(-1);
    const first = this.kept.find((each) => each.at >= (last?.at ?? 0) - seconds);
    return first && first !== last ? [first, last] : [null, null];
  }
}

function total(samples, name, labels = {}) {
  const wanted = Object.entries(labels);
  return (samples.get(name) ?? [])
    .filter((sample) => wanted.every(([label, value]) => sample.labels[label] === value))
    .reduce((sum, sample) => sum + sample.value, 0);
}
