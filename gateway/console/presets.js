// Named sets of the chat's parameters, kept in this browser.
const PREFIX = "preset/";

export class Presets {
  constructor(storage = localStorage) {
    this.storage = storage;
  }

  names() {
    const keys = Array.from({ length: this.storage.length }, (_, i) => this.storage.key(i));
    return keys
      .filter((key) => key.startsWith(PREFIX))
      .map((key) => key.slice(PREFIX.length))
      .sort();
  }

  // The values under a name; null where there are none.
  get(name) {
    return JSON.parse(this.storage.getItem(PREFIX + name) ?? "null");
  }

  save(name, values) {
    this.storage.setItem(PREFIX + name, JSON.stringify(values));
  }

  remove(name) {
    this.storage.removeItem(PREFIX + name);
  }
}
