// One question to two models, or with two sets of parameters, answered side by side.
import { Turn } from "./chat_turn.js";
import { choice, el, openDialog } from "./dom.js";
import { facts } from "./facts.js";
import { headers } from "./session.js";
import { answer } from "./stream.js";

const AS_IT_IS = [["", "as in this chat"]];

// `options` are the chat's, `messages` come before the question.
export function openComparison({ models, chosen, options, messages, question }) {
  const text = el("textarea", { rows: 3, "aria-label": "Question for both" });
  text.value = question;
  const sides = ["A", "B"].map((name) => new Side(name, models, chosen, options));
  const ask = el("button", { type: "button" }, "Ask both");
  let running = null;
  const stop = () => running?.abort();
  ask.addEventListener("click", async () => {
    if (running) return stop();
    if (!text.value.trim()) return text.focus();
    running = new AbortController();
    ask.textContent = "Stop";
    const asked = [...messages, { role: "user", content: text.value.trim() }];
    await Promise.all(sides.map((side) => side.answer(asked, running.signal)));
    running = null;
    ask.textContent = "Ask both";
  });
  const dialog = openDialog("Compare two answers", el("div", { class: "comparison" }, text, el("div", { class: "sides" }, ...sides.map(({ element }) => element))), ask);
  dialog.classList.add("wide");
  dialog.addEventListener("close", stop);
  text.focus();
}

class Side {
  constructor(name, models, chosen, options) {
    this.options = options;
    this.model = choice(`Model ${name}`, {}, models.map((each) => [each, each]));
    this.model.lastElementChild.value = chosen;
    this.preset = choice(`Parameters ${name}`, {}, [...AS_IT_IS, ...options.presets.names().map((each) => [each, each])]);
    this.place = el("div", { class: "side-answer" });
    this.element = el("section", { "aria-label": `Answer ${name}` }, this.model, this.preset, this.place);
  }

  // Shows an answer as it comes. What it is refused with is shown in its place.
  async answer(messages, signal) {
    const turn = new Turn("assistant");
    this.place.replaceChildren(turn.element);
    const began = performance.now();
    let first = null;
    try {
      const values = this.options.presets.get(this.preset.lastElementChild.value) ?? this.options.values();
      const body = this.options.request(this.model.lastElementChild.value, messages, values);
      const requestHeaders = { "content-type": "application/json", "x-headwater-receipt": "1", ...headers() };
      for await (const event of answer(body, requestHeaders, signal)) {
        const delta = event.choices[0]?.delta ?? {};
        if (delta.content || delta.reasoning_content || delta.tool_calls) first ??= performance.now();
        if (delta.reasoning_content) turn.addThoughts(delta.reasoning_content);
        if (delta.content) turn.add(delta.content);
        if (delta.tool_calls) turn.addCalls(delta.tool_calls);
        if (event.usage) turn.note(facts(event, first ?? performance.now(), began));
      }
    } catch (error) {
      turn.note(error.name === "AbortError" ? "stopped" : error.message, { failed: error.name !== "AbortError" });
    }
    turn.draw();
  }
}
