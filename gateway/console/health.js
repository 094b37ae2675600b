// Health: what is missing or degraded, and what to do about it.
import { el, setText, syncNodes } from "./dom.js";
import { badge, setBadge } from "./table.js";

const WORDS = { error: ["fails", "bad"], warning: ["degraded", "warn"], note: ["note", "soft"] };

export class HealthView {
  constructor() {
    this.title = "Health";
    this.sentence = el("p", { class: "verdict", role: "status" });
    this.list = el("ul", { class: "findings" });
    this.element = el("div", {}, this.sentence, this.list);
  }

  update({ findings, ready }) {
    const isWell = !findings.some(({ level }) => level !== "note");
    const state = ready.missing.length ? "Requests are not answered." : isWell ? "All is well." : "Requests are answered, with a loss.";
    setText(this.sentence, state);
    syncNodes(this.list, findings, ({ what }) => what, makeFinding, updateFinding);
  }
}

const makeFinding = () => el("li", {}, badge("", ""), el("strong"), el("p"));

function updateFinding(node, { level, what, advice }) {
  setBadge(node.children[0], ...WORDS[level]);
  setText(node.children[1], what);
  setText(node.children[2], advice);
}
