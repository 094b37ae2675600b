// The calculator of memory: which model fits, with how many users.
import { choice, el, factsList, field, section } from "./dom.js";
import { count } from "./format.js";
import { MODELS, WEIGHTS, memoryOf } from "./memory.js";

const NOTE = "For layers that keep keys and values of the whole text; windows, latent attention and states need less. The values of a model stand in its config.json.";

export class MemoryCalculator {
  constructor() {
    const number = (label, name, value, least = 1) => field(label, { name, type: "number", value, min: least, step: "any", required: true });
    const model = choice("Model", { onchange: () => this.fill(model.lastElementChild.value) }, Object.keys(MODELS).map((name) => [name, name]));
    this.form = el(
      "form",
      { class: "fields calculator", oninput: () => this.show(), onsubmit: (event) => event.preventDefault() },
      model,
      number("Billions of weights", "billions", 8, 0.01),
      choice("Weights", { name: "weights" }, Object.keys(WEIGHTS).map((name) => [name, name])),
      number("Layers", "layers", 32),
      number("KV heads", "kvHeads", 8),
      number("Size of a head", "headDim", 128),
      choice("Keys and values", { name: "kvBits" }, [["16", "16 bits"], ["8", "8 bits (fp8)"]]),
      number("Memory of the device, GB", "gigabytes", 24),
      number("Tokens of a user", "context", 8192),
    );
    this.result = el("div", { role: "status" });
    this.element = section("What fits into your memory", NOTE, this.form, this.result);
    model.lastElementChild.value = "8B (Llama 3.1)";
    this.show();
  }

  fill(name) {
    for (const [field, value] of Object.entries(MODELS[name])) this.form.elements[field].value = value;
    this.show();
  }

  show() {
    const { weights, ...numbers } = Object.fromEntries([...this.form.elements].filter(({ name }) => name).map(({ name, value }) => [name, value]));
    const needs = memoryOf({ weights, ...Object.fromEntries(Object.entries(numbers).map(([name, value]) => [name, Number(value)])) });
    const verdict = needs.users ? `${count(needs.users)} at once` : "none: a smaller model, weights of fewer bits, or more devices";
    this.result.replaceChildren(
      factsList({
        weights: `${needs.weights.toFixed(1)} GB`,
        "keys and values of a token": `${(needs.token * 1e6).toFixed(0)} kB`,
        "of a user": `${needs.user.toFixed(2)} GB`,
        "tokens that fit": count(needs.tokens),
        "users that fit": verdict,
      }),
    );
  }
}
