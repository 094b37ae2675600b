// Past chats, kept in this browser: one entry of its storage each.
const PREFIX = "chat/";
const TITLE_LENGTH = 60;

export const newChat = () => ({
  id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8),
  title: "",
  messages: [],
});

export class Chats {
  constructor(storage = localStorage) {
    this.storage = storage;
  }

  get(id) {
    const text = this.storage.getItem(PREFIX + id);
    return text === null ? null : { id, ...JSON.parse(text) };
  }

  // Newest first; with a text, those whose title or messages contain it.
  all(text = "") {
    const keys = Array.from({ length: this.storage.length }, (_, i) => this.storage.key(i));
    const sought = text.trim().toLowerCase();
    return keys
      .filter((key) => key.startsWith(PREFIX))
      .map((key) => this.get(key.slice(PREFIX.length)))
      .filter(({ title, messages }) => [title, ...messages.map(({ content }) => content ?? "")].some((each) => each.toLowerCase().includes(sought)))
      .sort((a, b) => b.at - a.at);
  }

  // A chat without messages is not kept. Where the storage is full, the oldest chats make room.
  save(chat) {
    const { id, messages } = chat;
    if (!messages.length) {
      this.remove(id);
      return;
    }
    chat.title ||= (messages[0].content ?? "").trim().slice(0, TITLE_LENGTH);
    const text = JSON.stringify({ title: chat.title, messages, at: Date.now() });
    for (;;) {
      try {
        this.storage.setItem(PREFIX + id, text);
        return;
      } catch {
        const oldest = this.all().findLast((each) => each.id !== id);
        if (!oldest) return;
        this.remove(oldest.id);
      }
    }
  }

  rename(id, title) {
    const chat = this.get(id);
    if (chat) this.storage.setItem(PREFIX + id, JSON.stringify({ title, messages: chat.messages, at: chat.at }));
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
  }
}
