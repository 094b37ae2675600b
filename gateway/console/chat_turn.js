// One turn of a chat on the page: a question, or an answer that grows, with what it cost below.
import { el, setText } from "./dom.js";
import { markdown } from "./markdown.js";

export class Turn {
  constructor(role, text = "") {
    this.body = el("div", { class: "text" });
    this.thought = el("div", { class: "thought" });
    this.folded = el("details", { class: "facts thoughts" }, el("summary", {}, "Thoughts"), this.thought);
    this.folded.hidden = true;
    const thoughts = role === "user" ? null : this.folded;
    this.status = el("p", { class: "facts waiting" });
    this.element = el("article", { class: role, "aria-label": role === "user" ? "You" : "Model" }, thoughts, this.body, this.status);
    this.role = role;
    this.text = "";
    this.thoughts = "";
    this.calls = [];
    this.frame = null;
    this.status.hidden = true;
    this.add(text);
  }

  add(text) {
    this.text += text;
    if (this.role === "user") setText(this.body, this.text);
    else this.drawLater();
  }

  // Thoughts are open while nothing but them has come, and folded where the answer begins.
  addThoughts(text) {
    this.thoughts += text;
    this.drawLater();
  }

  // Not with each token: a long answer would be drawn anew hundreds of times a second.
  drawLater() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const calls = this.calls.map(({ function: { name, arguments: given } }) =>
      el("div", { class: "call" }, el("strong", {}, `calls ${name}`), el("pre", { tabindex: "0" }, el("code", {}, given))),
    );
    this.folded.hidden = !this.thoughts;
    setText(this.thought, this.thoughts);
    const isThinking = !this.text && !this.calls.length;
    if (isThinking !== this.wasThinking) this.folded.open = isThinking;
    this.wasThinking = isThinking;
    this.body.replaceChildren(...markdown(this.text), ...calls);
  }

  // Pieces of tool calls, by their index.
  addCalls(deltas) {
    for (const { index, id, function: piece } of deltas) {
      const call = (this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += piece?.name ?? "";
      call.function.arguments += piece?.arguments ?? "";
    }
    this.drawLater();
  }

  // What it waits for, while nothing has come; empty: for nothing.
  wait(text) {
    this.status.hidden = !text;
    setText(this.status, text);
  }

  // A button below the turn. The style sheet writes its name, so that it is no part of the turn's text.
  offer(name, act) {
    this.element.append(el("button", { type: "button", class: `quiet small sign ${name.split(" ")[0].toLowerCase()}`, "aria-label": name, title: name, onclick: act }));
  }

  note(text, { failed = false, receipt = null, again = null } = {}) {
    const line = el("p", { class: failed ? "facts failed" : "facts" }, text);
    if (again) line.append(" ", el("button", { type: "button", class: "quiet small", onclick: again }, "Send again"));
    this.element.append(line);
    if (receipt) {
      this.element.append(
        el("details", { class: "facts" }, el("summary", {}, "Receipt"), el("pre", { tabindex: "0" }, JSON.stringify(receipt, null, 2))),
      );
    }
  }

  // The message that the next request carries; null for an answer without one.
  message() {
    if (this.role === "user") return { role: "user", content: this.text };
    if (!this.text && !this.calls.length) return null;
    const thoughts = this.thoughts ? { reasoning_content: this.thoughts } : {};
    return { role: "assistant", content: this.text, ...thoughts, ...(this.calls.length ? { tool_calls: this.calls } : {}) };
  }
}
