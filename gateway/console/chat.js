// Chat: a conversation over /v1/chat/completions that streams, stops, survives a reload, and says what each answer cost.
import { asCurl, asGrpc, asPython } from "./as_code.js";
import { ChatList } from "./chat_list.js";
import { ChatOptions } from "./chat_options.js";
import { Turn } from "./chat_turn.js";
import { Chats, newChat } from "./chats.js";
import { openComparison } from "./comparison.js";
import { el, openDialog } from "./dom.js";
import { facts } from "./facts.js";
import { call, headers, key, root } from "./session.js";
import { answer as answered } from "./stream.js";

const OPEN = "open-chat";
const CODE = ["curl", "Python, OpenAI's library", "Python, gRPC"];

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
    const code = el("button", { id: "code", type: "button", class: "quiet", onclick: () => this.showCode() }, "As code");
    const compare = el("button", { id: "compare", type: "button", class: "quiet", onclick: () => this.compare() }, "Compare");
    this.chats = new Chats();
    this.past = new ChatList(this.chats, { open: (id) => this.open(id), changed: (id) => this.changed(id) });
    this.element = el("div", { class: "chat" }, el("div", { class: "bar-row" }, this.model, clear, code, compare, this.options.element, this.past.element), this.log, this.form);
    this.running = null;
    this.listen();
    this.begin(this.chats.get(sessionStorage.getItem(OPEN)) ?? newChat());
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.question.value.trim();
      if (this.running) this.running.abort();
      else if (text) {
        this.question.value = "";
        this.grow();
        this.ask(this.pending ? { role: "tool", tool_call_id: this.pending.id, content: text } : { role: "user", content: text });
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

  // The tool call whose result the next message is.
  get pending() {
    const done = new Set(this.messages.filter(({ role }) => role === "tool").map((each) => each.tool_call_id));
    const calls = this.messages.findLast(({ role }) => role === "assistant")?.tool_calls ?? [];
    return calls.find(({ id }) => !done.has(id)) ?? null;
  }

  get messages() {
    return this.chat.messages;
  }

  // Shows a chat, which the next message goes on with.
  begin(chat) {
    this.running?.abort();
    this.chat = chat;
    sessionStorage.setItem(OPEN, chat.id);
    this.log.replaceChildren(this.messages.length ? "" : this.welcome);
    this.messages.forEach((message, i) => {
      const turn = this.show(message.role === "assistant" ? "assistant" : "user", message.content ?? "");
      turn.calls = message.tool_calls ?? [];
      turn.thoughts = message.reasoning_content ?? "";
      if (turn.role === "assistant") turn.draw();
      this.offer(turn, i);
    });
    this.hint();
  }

  open(id) {
    const chat = this.chats.get(id);
    if (chat) this.begin(chat);
  }

  // A chat of the list has another title, or is gone.
  changed(id) {
    if (id !== this.chat.id) return;
    const kept = this.chats.get(id);
    if (kept) this.chat.title = kept.title;
    else this.clear();
  }

  // Keeps a chat, unless it was deleted while it was answered.
  keep(chat) {
    if (chat === this.chat || this.chats.get(chat.id)) this.chats.save(chat);
    this.hint();
  }

  hint() {
    this.question.placeholder = this.pending ? `Result of ${this.pending.function.name}` : "Message";
  }

  clear() {
    this.begin(newChat());
    this.question.focus();
  }

  // What can be done with the message at a place of the chat.
  offer(turn, i) {
    if (turn.role === "user") {
      if (this.messages[i].role === "user") turn.offer("Edit", () => this.edit(i));
      return;
    }
    if (navigator.clipboard) turn.offer("Copy", () => navigator.clipboard.writeText(turn.text));
    turn.offer("Answer again", () => this.again(i));
  }

  // Goes on from a message of the person in a chat of its own, so that the one that was stays.
  edit(i) {
    const { messages } = this;
    this.begin({ ...newChat(), messages: messages.slice(0, i) });
    this.question.value = messages[i].content;
    this.grow();
    this.question.focus();
  }

  // Asks once more for the answer at a place; what followed it stays in the chat that was.
  again(i) {
    const { messages } = this;
    const isLast = i === messages.length - 1;
    const before = messages.slice(0, i);
    const asked = before.pop();
    this.begin(isLast ? { ...this.chat, messages: before } : { ...newChat(), messages: before });
    this.ask(asked);
  }

  async showCode() {
    const last = this.messages.findLastIndex(({ role }) => role !== "assistant");
    const turns = last < 0 ? [{ role: "user", content: "Hello" }] : this.messages.slice(0, last + 1);
    let text;
    try {
      const body = this.options.request(this.model.value || (await firstModel()), turns);
      const hasKey = key() !== "";
      const base = location.origin + root;
      const address = `${location.hostname}:${this.grpcPort ?? 8001}`;
      text = [asCurl(base, body, hasKey), asPython(base, body, hasKey), asGrpc(address, body, hasKey, location.protocol === "https:")];
    } catch (error) {
      text = [error.message];
    }
    const titled = text.map((each, i) => [el("h3", {}, CODE[i]), el("pre", { tabindex: "0" }, each)]);
    openDialog("This chat as code", el("div", {}, ...(text.length > 1 ? titled.flat() : text)));
  }

  compare() {
    const last = this.messages.findLastIndex(({ role }) => role === "user");
    openComparison({
      models: [...this.model.options].map(({ value }) => value),
      chosen: this.model.value,
      options: this.options,
      messages: last < 0 ? [] : this.messages.slice(0, last),
      question: this.question.value || (this.messages[last]?.content ?? ""),
    });
  }

  // The models that may be asked, by the live snapshot.
  update({ models, grpc_port: grpcPort }) {
    this.grpcPort = grpcPort;
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
    // Another chat may be shown before this answer has ended; it then belongs to the old one.
    const { chat, messages } = this;
    messages.push(message);
    this.offer(asked, messages.length - 1);
    this.keep(chat);
    // An answer with several calls waits for the results of all.
    if (this.pending) return;
    const turn = this.show("assistant");
    const running = new AbortController();
    this.running = running;
    this.send.textContent = "Stop";
    const waiting = setInterval(() => this.wait(turn), 500);
    try {
      await this.answer(turn, messages, running.signal);
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
    if (answer) this.offer(turn, messages.length - 1);
    this.keep(chat);
    if (this.running !== running) return;
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
    if (turn.text || turn.thoughts || turn.calls.length) turn.wait("");
    else turn.wait(this.states?.get(this.model.value)?.replicas === 0 ? "waiting for an engine to start…" : "waiting…");
  }

  async answer(turn, messages, signal) {
    const began = performance.now();
    const asked = this.options.request(this.model.value || (await firstModel()), messages);
    turn.element.classList.add("running");
    const requestHeaders = { "content-type": "application/json", "x-headwater-receipt": "1", ...headers() };
    let first = null;
    for await (const event of answered(asked, requestHeaders, signal)) {
      const delta = event.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.tool_calls) first ??= performance.now();
      if (delta.reasoning_content) turn.addThoughts(delta.reasoning_content);
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
