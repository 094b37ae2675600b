// Chat: a conversation over /v1/chat/completions that streams, stops, survives a reload, and says what each answer cost.
import { ChatOptions } from "./chat_options.js";
import { Turn } from "./chat_turn.js";
import { el } from "./dom.js";
import { facts } from "./facts.js";
import { call, headers } from "./session.js";
import { answer as answered } from "./stream.js";

const KEPT = "conversation";

export class ChatView {
  constructor() {
    this.title = "Chat";
    this.options = new ChatOptions();
    this.model = el("select", { id: "model", "aria-label": "Model" });
    this.log = el("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.welcome = el("p", { class: "empty" }, "Ask something. Each answer says how fast it came, how much of the prompt was cached, and which engine served it.");
    this.question = el("textarea", { id: "question", rows: 1, placeholder: "Message", "aria-label": "Message" });
    this.send = el("button", { id: "send", type: "submit" }, "Send");
    this.form = el("form", { class: "ask" }, this.question, this.send);
    const clear = el("button", { id: "new", type: "button", class: "quiet", onclick: () => this.clear() }, "New chat");
    this.element = el("div", { class: "chat" }, el("div", { class: "bar-row" }, this.model, clear, this.options.element), this.log, this.form);
    this.messages = [];
    this.running = null;
    this.listen();
    this.restore();
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.question.value.trim();
      if (this.running) this.running.abort();
      else if (text) {
        this.question.value = "";
        this.grow();
        this.ask(this.pending ? { role: "tool", tool_call_id: this.pending, content: text } : { role: "user", content: text });
      }
    });
    this.question.addEventListener("input", () => this.grow());
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !this.running) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
  }

  // The id of the tool call whose result the next message is.
  get pending() {
    const done = new Set(this.messages.filter(({ role }) => role === "tool").map((each) => each.tool_call_id));
    const calls = this.messages.findLast(({ role }) => role === "assistant")?.tool_calls ?? [];
    return calls.find(({ id }) => !done.has(id))?.id ?? null;
  }

  restore() {
    this.messages = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    this.log.replaceChildren(this.messages.length ? "" : this.welcome);
    for (const message of this.messages) {
      const turn = this.show(message.role === "assistant" ? "assistant" : "user", message.content ?? "");
      turn.calls = message.tool_calls ?? [];
      if (turn.calls.length) turn.draw();
    }
    this.hint();
  }

  keep() {
    sessionStorage.setItem(KEPT, JSON.stringify(this.messages));
    this.hint();
  }

  hint() {
    this.question.placeholder = this.pending ? "Result of the tool" : "Message";
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.keep();
    this.log.replaceChildren(this.welcome);
    this.question.focus();
  }

  // The models that may be asked, by the live snapshot.
  update({ models }) {
    this.states = new Map(models.map((each) => [each.id, each]));
    const names = models.filter(({ state }) => state !== "failed").map(({ id }) => id);
    if (names.join("\n") === [...this.model.options].map(({ value }) => value).join("\n")) return;
    // The first choice is a model that can answer now.
    const chosen = this.model.value || (models.find(({ replicas, state }) => replicas !== 0 && state !== "failed")?.id ?? names[0]);
    this.model.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  }

  show(role, text = "") {
    this.welcome.remove();
    const turn = new Turn(role, text);
    this.log.append(turn.element);
    this.log.scrollTop = this.log.scrollHeight;
    return turn;
  }

  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 120) this.log.scrollTop = scrollHeight;
  }

  async ask(message) {
    const asked = this.show("user", message.content);
    // A new chat may begin before this answer has ended; it then belongs to the old one.
    const messages = this.messages;
    messages.push(message);
    this.keep();
    const turn = this.show("assistant");
    this.running = new AbortController();
    this.send.textContent = "Stop";
    const waiting = setInterval(() => this.wait(turn), 500);
    try {
      await this.answer(turn, messages);
    } catch (error) {
      this.failed(turn, asked, message, messages, error);
    }
    clearInterval(waiting);
    turn.draw(); // Its last tokens may wait for a frame, and a page in the background gets none.
    turn.wait("");
    turn.element.classList.remove("running");
    // What was answered stays part of the conversation, also when it was stopped; a question without an answer does not.
    const answer = turn.message();
    if (answer) messages.push(answer);
    else messages.pop();
    if (messages === this.messages) this.keep();
    this.running = null;
    this.send.textContent = "Send";
    this.question.focus();
  }

  failed(turn, asked, message, messages, error) {
    if (error.name === "AbortError") {
      turn.note("stopped");
      return;
    }
    const again = () => {
      asked.element.remove();
      turn.element.remove();
      this.ask(message);
    };
    const where = error.status === 401 ? ": enter it under “Key” above" : "";
    turn.note(error.message + where, { failed: true, again: turn.message() || messages !== this.messages ? null : again });
  }

  wait(turn) {
    if (turn.text || turn.calls.length) turn.wait("");
    else turn.wait(this.states?.get(this.model.value)?.replicas === 0 ? "waiting for an engine to start…" : "waiting…");
  }

  async answer(turn, messages) {
    const began = performance.now();
    const asked = this.options.request(this.model.value || (await firstModel()), messages);
    turn.element.classList.add("running");
    const told = { "content-type": "application/json", "x-headwater-receipt": "1", ...headers() };
    let first = null;
    for await (const event of answered(asked, told, this.running.signal)) {
      const delta = event.choices[0]?.delta ?? {};
      if (delta.content || delta.tool_calls) first ??= performance.now();
      if (delta.content) turn.add(delta.content);
      if (delta.tool_calls) turn.addCalls(delta.tool_calls);
      if (event.usage) turn.note(facts(event, first ?? performance.now(), began), { receipt: event.receipt ?? null });
      this.follow();
    }
  }

  grow() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight}px`;
  }
}

async function firstModel() {
  const { data } = await call("GET", "/v1/models");
  if (!data.length) throw new Error("no model is served yet");
  return data[0].id;
}
