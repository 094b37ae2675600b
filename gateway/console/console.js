// A chat page over /v1/chat/completions: streams, stops, and shows what each answer cost.
import { facts } from "./facts.js";
import { answer as answered, refusal } from "./stream.js";

const find = (id) => document.getElementById(id);
const [model, question, send, list] = ["model", "question", "send", "messages"].map(find);
const kept = ["system", "temperature", "max-tokens", "key"];
const welcome = find("welcome");
let conversation = [];
let running = null;

const headers = () => ({
  "content-type": "application/json",
  "x-headwater-receipt": "1",
  ...(find("key").value ? { authorization: `Bearer ${find("key").value}` } : {}),
});

async function listModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  const { data } = await response.json();
  model.replaceChildren(...data.map(({ id }) => new Option(id, id)));
}

function show(role, text = "") {
  welcome.remove();
  const article = document.createElement("article");
  article.className = role;
  const body = article.appendChild(document.createElement("div"));
  body.className = "text";
  body.textContent = text;
  list.append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function note(article, text, failed = false) {
  const facts = article.appendChild(document.createElement("p"));
  facts.className = failed ? "facts failed" : "facts";
  facts.textContent = text;
  facts.scrollIntoView({ block: "end" });
}

async function answer(article, turns) {
  const system = find("system").value.trim();
  const began = performance.now();
  const asked = {
    model: model.value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    temperature: Number(find("temperature").value),
    max_tokens: Number(find("max-tokens").value),
  };
  const body = article.firstChild;
  let first = null;
  for await (const event of answered(asked, headers(), running.signal)) {
    const text = event.choices[0]?.delta?.content;
    if (text) {
      first ??= performance.now();
      const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
      body.append(text);
      if (follows) list.scrollTop = list.scrollHeight;
    }
    if (event.usage) note(article, facts(event, first ?? performance.now(), began));
  }
}

async function ask(text) {
  running = new AbortController();
  send.textContent = "Stop";
  show("user", text);
  // A new chat may begin before this answer has ended; it then belongs to the old one.
  const turns = conversation;
  turns.push({ role: "user", content: text });
  const article = show("assistant running");
  try {
    await answer(article, turns);
  } catch (error) {
    note(article, error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  article.classList.remove("running");
  // What was answered stays part of the conversation, also when it was stopped; a question without an answer does not.
  if (article.firstChild.textContent) turns.push({ role: "assistant", content: article.firstChild.textContent });
  else turns.pop();
  running = null;
  send.textContent = "Send";
  question.focus();
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (running) running.abort();
  else if (text) {
    question.value = "";
    grow();
    ask(text);
  }
});
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
find("new").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  list.replaceChildren(welcome);
  question.focus();
});
for (const id of kept) {
  const field = find(id);
  field.value = sessionStorage.getItem(id) ?? field.value;
  field.addEventListener("change", () => sessionStorage.setItem(id, field.value));
}
const shown = find("temperature-shown");
const showTemperature = () => { shown.textContent = find("temperature").value; };
find("temperature").addEventListener("input", showTemperature);
showTemperature();
const load = () => listModels().catch((error) => { welcome.textContent = error.message; });
find("key").addEventListener("change", load);
load();
