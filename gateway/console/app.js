// The page: which view is shown, the key, and the stream of snapshots that feeds all views.
import { BatchesView } from "./batches.js";
import { ChatView } from "./chat.js";
import { el, find, openDialog, setText } from "./dom.js";
import { HealthView } from "./health.js";
import { History, withRates } from "./history.js";
import { LiveSource } from "./live_source.js";
import { LiveView } from "./live.js";
import { ModelsView } from "./models.js";
import { key, setKey } from "./session.js";
import { SystemView } from "./system.js";
import { TenantsView } from "./tenants.js";

const STATE_WORDS = { live: "live", waiting: "reconnecting", refused: "key needed" };

const views = {
  chat: new ChatView(),
  live: new LiveView(),
  models: new ModelsView(),
  batches: new BatchesView(),
  tenants: new TenantsView(),
  system: new SystemView(),
  health: new HealthView(),
};
let history = new History();
let current = "";

const name = () => {
  const asked = location.hash.slice(1);
  return asked in views ? asked : "chat";
};

function show(focus) {
  if (current === name()) return;
  current = name();
  const view = views[current];
  for (const link of find("views").querySelectorAll("a")) {
    if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  setText(find("title"), view.title);
  document.title = `${view.title} · Headwater`;
  find("view").replaceChildren(view.element);
  document.body.dataset.view = current;
  if (current === "chat") view.follow();
  if (focus) find("title").focus();
}

function take(reported) {
  const snapshot = reported.replicas ? { ...reported, replicas: withRates(reported, history) } : reported;
  for (const view of Object.values(views)) view.update(snapshot, history);
  const { is_admin: isAdmin, name: who } = snapshot.caller;
  for (const link of find("views").querySelectorAll("[data-admin]")) link.parentElement.hidden = !isAdmin;
  const errors = snapshot.findings.filter(({ level }) => level !== "note").length;
  setText(find("alarm"), errors ? ` ${errors}` : "");
  setText(find("who"), `${who} · ${snapshot.gateway}`);
}

function tellState(state, sentence) {
  setText(find("state"), STATE_WORDS[state]);
  find("state").className = `badge ${{ live: "good", waiting: "warn", refused: "bad" }[state]}`;
  const isRefused = state === "refused";
  find("banner").hidden = state === "live";
  setText(find("banner-text"), isRefused ? `${sentence}. Enter a key to go on.` : sentence);
  find("banner-key").hidden = !isRefused;
}

const source = new LiveSource(take, tellState);

function askKey() {
  const input = el("input", { id: "key", type: "password", autocomplete: "off", value: key() });
  const form = el("form", {}, el("label", {}, "API key, or an administrator's key; it stays in this tab", input));
  const done = (event) => {
    event.preventDefault();
    setKey(input.value);
    dialog.close();
    history = new History();
    source.start();
  };
  form.addEventListener("submit", done);
  const dialog = openDialog("Key", form, el("button", { type: "button", onclick: done }, "Use it"));
  input.focus();
}

for (const id of ["key-button", "banner-key"]) find(id).addEventListener("click", askKey);
window.addEventListener("hashchange", () => show(true));
show(false);
if (current === "chat") views.chat.question.focus();
source.start();
