// The parameters of a chat: their fields, kept in the tab, and the request that they make.
import { confirmed, el, field, openDialog } from "./dom.js";
import { Presets } from "./presets.js";

const NUMBERS = [
  { id: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.7 },
  { id: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { id: "max_tokens", label: "Longest answer, in tokens", min: 1, step: 1, value: 512 },
  { id: "seed", label: "Seed", step: 1 },
];
const TEXTS = [
  { id: "system", label: "System prompt", rows: 3, placeholder: "You are a helpful assistant." },
  { id: "stop", label: "Stop at, a text a line", rows: 2 },
  { id: "tools", label: "Tools, as JSON", rows: 3, placeholder: '[{"type": "function", "function": {"name": "weather", …}}]' },
  { id: "schema", label: "JSON schema of the answer", rows: 3, placeholder: '{"type": "object", "properties": {…}}' },
];
const KEPT = "chat-options";

export class ChatOptions {
  constructor() {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    const value = ({ id, value: usual = "" }) => kept[id] ?? usual;
    const texts = TEXTS.map((each) => this.field(each.label, el("textarea", { name: each.id, rows: each.rows, placeholder: each.placeholder, spellcheck: "false" }), value(each)));
    const numbers = NUMBERS.map(({ id, label, ...more }) =>
      this.field(label, el("input", { name: id, type: "number", ...more, value: null, placeholder: "the model's" }), value({ id, ...more })),
    );
    this.presets = new Presets();
    this.preset = el("select", { "aria-label": "Preset", onchange: () => this.use(this.preset.value) });
    const keep = el("button", { type: "button", class: "quiet small", onclick: () => this.keep() }, "Save as a preset");
    this.forget = el("button", { type: "button", class: "quiet small", onclick: () => this.remove() }, "Delete the preset");
    this.drawPresets("");
    this.form = el("form", { class: "panel" }, el("div", { class: "bar-row" }, this.preset, keep, this.forget), texts[0], el("div", { class: "pairs" }, ...numbers), ...texts.slice(1));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("change", () => sessionStorage.setItem(KEPT, JSON.stringify(this.values())));
    this.element = el("details", { class: "options" }, el("summary", {}, "Parameters"), this.form);
  }

  field(label, input, value) {
    input.value = value;
    return el("label", {}, label, input);
  }

  drawPresets(chosen) {
    this.preset.replaceChildren(new Option("no preset", ""), ...this.presets.names().map((name) => new Option(name, name)));
    this.preset.value = chosen;
    this.forget.hidden = !chosen;
  }

  // Fills the fields with a preset's values.
  use(name) {
    this.forget.hidden = !name;
    for (const [id, value] of Object.entries(this.presets.get(name) ?? {})) if (this.form.elements[id]) this.form.elements[id].value = value;
    this.form.dispatchEvent(new Event("change"));
  }

  keep() {
    const name = field("Name", { maxlength: 60, required: true });
    const input = name.lastElementChild;
    input.value = this.preset.value;
    const save = (event) => {
      event.preventDefault();
      if (!input.reportValidity()) return;
      this.presets.save(input.value.trim(), this.values());
      dialog.close();
      this.drawPresets(input.value.trim());
    };
    const dialog = openDialog("Save as a preset", el("form", { onsubmit: save }, name), el("button", { type: "button", onclick: save }, "Save"));
    input.select();
  }

  async remove() {
    const name = this.preset.value;
    if (!(await confirmed(`Delete the preset “${name}”?`, "The fields stay as they are.", "Delete"))) return;
    this.presets.remove(name);
    this.drawPresets("");
  }

  values() {
    return Object.fromEntries([...this.form.elements].filter(({ name }) => name).map(({ name, value }) => [name, value]));
  }

  // Fields of a request, of those that are given. Throws an error that names the field that is no JSON.
  request(model, turns, values = this.values()) {
    const { system, stop, tools, schema, ...numbers } = values;
    const body = { model, messages: [...(system.trim() ? [{ role: "system", content: system }] : []), ...turns] };
    for (const [name, value] of Object.entries(numbers)) if (value !== "") body[name] = Number(value);
    if (stop.trim()) body.stop = stop.split("\n").filter(Boolean);
    if (tools.trim()) body.tools = parsed("Tools", tools);
    if (schema.trim()) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("JSON schema", schema) } };
    }
    return body;
  }
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}
