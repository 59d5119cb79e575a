// Numbers and times as people read them, and names as keys may use them.

const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export const when = (seconds) => WHEN.format(new Date(seconds * 1000));

// Numbers stay with their units: the spaces in what follows do not break.
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.9995) return `${short(value * 1000)}\u00a0ms`;
  return value < 90 ? `${short(value)}\u00a0s` : `${Math.round(value / 60)}\u00a0min`;
}

// Three digits that say something.
export const short = (value) =>
  value === null || value === undefined || !Number.isFinite(value)
    ? "–"
    : value.toLocaleString(undefined, { maximumSignificantDigits: 3 });

// A time to come, for a sentence: "30 s", "4 min".
export const about = (value) =>
  value < 90 ? `${Math.max(1, Math.round(value))}\u00a0s` : `${Math.round(value / 60)}\u00a0min`;

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${value.toFixed(place && value < 10 ? 1 : 0)}\u00a0${units[place]}`;
}

export const number = (value, digits = 0) =>
  value === null || value === undefined || !Number.isFinite(value)
    ? "–"
    : value.toLocaleString(undefined, {
        minimumFractionDigits: digits,
        maximumFractionDigits: digits,
      });

export const percent = (value) =>
  Number.isFinite(value)
    ? `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)}\u00a0%`
    : "–";

export const plural = (count, one, many = `${one}s`) =>
  `${number(count)} ${count === 1 ? one : many}`;

// Patterns of names as key files have them: * and ? and [abc].
export function matches(name, patterns) {
  return patterns.some((pattern) => {
    const source = pattern
      .replace(/[.+^${}()|\\]/g, "\\$&")
      .replace(/\*/g, ".*")
      .replace(/\?/g, ".")
      .replace(/\[(?![^\]]*\])/g, "\\[")
      .replace(/\[!/g, "[^");
    return new RegExp(`^${source}$`, "s").test(name);
  });
}
