// Settings of a model that is loaded, each with its field: the supervisor says which there are.
import { choice, el, setText } from "./dom.js";
import { call } from "./session.js";

const SWITCH = [
  ["", ""],
  ["true", "on"],
  ["false", "off"],
];
const READ = {
  number: Number,
  whole: Number,
  boolean: (text) => text === "true",
  list: (text) => text.split(/[\s,]+/).filter(Boolean),
  path: (text) => text,
  text: (text) => text,
};

export class ModelSettings {
  constructor() {
    this.form = el("form", { class: "fields calculator", onsubmit: (event) => event.preventDefault() });
    this.notice = el("p", { class: "notice", role: "status" });
    this.element = el("details", { ontoggle: () => this.read() }, el("summary", {}, "Settings of this model alone"), this.notice, this.form);
  }

  async read() {
    if (!this.element.open || this.form.children.length) return;
    try {
      const { data } = await call("GET", "/admin/model-settings");
      this.form.replaceChildren(...data.map(fieldOf));
      setText(this.notice, "Fields that are empty have the value that they show.");
    } catch (error) {
      setText(this.notice, error.message);
    }
  }

  // Settings that have a value, by name.
  given() {
    const fields = [...this.form.elements].filter(({ value }) => value !== "");
    return Object.fromEntries(fields.map(({ name, value, dataset }) => [name, READ[dataset.kind](value)]));
  }

  reset() {
    this.form.reset();
  }
}

function fieldOf({ name, help, kind, value }) {
  const attributes = { name, title: help, "data-kind": kind };
  const label = name.replaceAll("_", " ");
  if (kind === "boolean") return choice(label, attributes, SWITCH.map(([each, text]) => [each, text || value]));
  const steps = { number: "any", whole: 1 };
  return el("label", {}, label, el("input", { ...attributes, type: kind in steps ? "number" : "text", step: steps[kind], placeholder: value }));
}
