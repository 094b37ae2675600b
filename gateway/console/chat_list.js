// The list of past chats: opens, renames, exports and deletes them.
import { confirmed, el, openDialog } from "./dom.js";

export class ChatList {
  // `open` takes a chat's id, `changed` that of a chat that was renamed or deleted.
  constructor(chats, { open, changed }) {
    this.chats = chats;
    this.open = open;
    this.changed = changed;
    this.search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search chats", oninput: () => this.draw() });
    this.list = el("ul", { class: "chat-list", "aria-label": "Past chats" });
    const note = el("p", { class: "note" }, "Kept in this browser alone, for everybody who uses it.");
    const panel = el("div", { class: "panel" }, this.search, this.list, note);
    this.element = el("details", { class: "options", id: "chats", ontoggle: () => this.draw() }, el("summary", {}, "Chats"), panel);
  }

  draw() {
    if (!this.element.open) return;
    const rows = this.chats.all(this.search.value).map((chat) => this.row(chat));
    this.list.replaceChildren(...(rows.length ? rows : [el("li", { class: "note" }, "No chats.")]));
  }

  row(chat) {
    const button = (text, act) => el("button", { type: "button", class: "quiet small", "aria-label": `${text} ${chat.title}`, onclick: act }, text);
    const title = el("button", { type: "button", class: "quiet title", onclick: () => this.choose(chat.id) }, chat.title || "Untitled");
    const actions = [button("Rename", () => this.rename(chat)), button("Export", () => download(chat)), button("Delete", () => this.remove(chat))];
    return el("li", {}, title, ...actions);
  }

  choose(id) {
    this.element.open = false;
    this.open(id);
  }

  rename(chat) {
    const input = el("input", { "aria-label": "Title", maxlength: 200 });
    input.value = chat.title;
    const form = el("form", { onsubmit: (event) => (event.preventDefault(), save()) }, input);
    const save = () => {
      this.chats.rename(chat.id, input.value.trim());
      dialog.close();
      this.changed(chat.id);
      this.draw();
    };
    const dialog = openDialog("Rename the chat", form, el("button", { type: "button", onclick: save }, "Rename"));
    input.select();
  }

  async remove(chat) {
    if (!(await confirmed(`Delete “${chat.title}”?`, "The chat cannot be brought back.", "Delete"))) return;
    this.chats.remove(chat.id);
    this.changed(chat.id);
    this.draw();
  }
}

// Saves the messages as a file, as /v1/chat/completions takes them.
function download({ title, messages }) {
  const url = URL.createObjectURL(new Blob([JSON.stringify({ messages }, null, 2)], { type: "application/json" }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";
  el("a", { href: url, download: `${name}.json` }).click();
  URL.revokeObjectURL(url);
}
