// Numbers for people.
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const plain = new Intl.NumberFormat("en");

export const count = (value) => (Math.abs(value) < 10_000 ? plain.format(value) : compact.format(value));

export const rate = (value) => (value === null ? "–" : value < 100 ? value.toFixed(1) : count(Math.round(value)));

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export const bytes = (value) => (value < 1e9 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(1)} GB`);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
