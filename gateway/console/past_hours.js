// Figures of the last hours, from the samples that gateways keep: they are there after a reload.
import { drawSparkline, sparkline } from "./drawing.js";
import { el, setText } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { call } from "./session.js";

const PAUSE_MS = 30_000;
const FIGURES = [
  { title: "tokens/s", read: (each) => each.output_tokens, show: rate },
  { title: "requests ended/min", read: (each) => each.num_finished * 60, show: rate },
  { title: "refused/min", read: (each) => each.num_refused * 60, show: rate },
  { title: "running", read: (each) => each.num_running, show: count },
  { title: "waiting", read: (each) => each.num_waiting, show: count },
  { title: "prompt tokens cached", read: (each) => each.cached_share, show: (value) => percent(value, 1) },
];

export class PastHours {
  constructor() {
    this.span = el("p", { class: "note" });
    this.rows = FIGURES.map(({ title }) => el("tr", {}, el("th", { scope: "row" }, title), el("td", {}, sparkline()), el("td"), el("td"), el("td")));
    const heads = ["figure", "past", "now", "mean", "most"].map((each) => el("th", { scope: "col" }, each));
    const table = el("table", { class: "hours" }, el("caption", { class: "hidden" }, "Figures of the last hours"), el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...this.rows));
    this.element = el("details", { class: "block", ontoggle: () => this.read() }, el("summary", {}, "Last hours"), this.span, el("div", { class: "scroll" }, table));
    this.readAt = 0;
  }

  update(isAdmin) {
    this.element.hidden = !isAdmin;
    if (isAdmin && this.element.open && Date.now() - this.readAt > PAUSE_MS) this.read();
  }

  async read() {
    if (!this.element.open) return;
    this.readAt = Date.now();
    try {
      this.show(await call("GET", "/console/history"));
    } catch (error) {
      setText(this.span, error.message);
    }
  }

  show({ seconds: step, data }) {
    setText(this.span, data.length ? `${seconds(data.length * step)} in samples of ${step} s, of all gateways` : "The first sample comes after half a minute.");
    FIGURES.forEach(({ read, show }, i) => {
      const values = data.map(read).filter((each) => each !== null);
      const [, past, now, mean, most] = this.rows[i].children;
      drawSparkline(past.firstElementChild, values, Math.max(2, values.length));
      const reported = values.length ? [values.at(-1), values.reduce((a, b) => a + b, 0) / values.length, Math.max(...values)] : [];
      [now, mean, most].forEach((cell, n) => setText(cell, reported.length ? show(reported[n]) : "–"));
    });
  }
}
