// One turn of a chat on the page: a question, or an answer that grows, with what it cost below.
import { el, setText } from "./dom.js";
import { markdown } from "./markdown.js";

export class Turn {
  constructor(role, text = "") {
    this.body = el("div", { class: "text" });
    this.status = el("p", { class: "facts waiting" });
    this.element = el("article", { class: role, "aria-label": role === "user" ? "You" : "Model" }, this.body, this.status);
    this.role = role;
    this.text = "";
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
    return { role: "assistant", content: this.text, ...(this.calls.length ? { tool_calls: this.calls } : {}) };
  }
}
