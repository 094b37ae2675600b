// A table whose rows stay while their items do. A column has a title and either `text(item)`, or `make(item)` with an
// optional `update(node, item)` for cells that hold more than text.
import { el, setText, syncNodes } from "./dom.js";

export class LiveTable {
  constructor(caption, key, columns, empty) {
    this.key = key;
    this.columns = columns;
    this.body = el("tbody", { role: "rowgroup" });
    const heads = columns.map(({ title, numeric }) => el("th", { scope: "col", role: "columnheader", class: numeric ? "number" : null }, title || hidden("actions")));
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads));
    // Roles by name: small screens lay tables out as cards, and browsers then forget what they are.
    const table = el("table", { role: "table" }, el("caption", { class: "hidden" }, caption), head, this.body);
    this.empty = el("p", { class: "empty" }, empty);
    // Wide tables scroll by themselves, by keyboard too.
    this.frame = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    this.element = el("div", {}, this.frame, this.empty);
  }

  update(items) {
    this.frame.hidden = !items.length;
    this.empty.hidden = items.length > 0;
    syncNodes(this.body, items, this.key, (item) => this.makeRow(item), (row, item) => this.updateRow(row, item));
  }

  makeRow(item) {
    const cells = this.columns.map(({ title, make, numeric, head }) => {
      const role = head ? "rowheader" : "cell";
      const cell = el(head ? "th" : "td", { role, class: numeric ? "number" : null, scope: head ? "row" : null, "data-title": title });
      if (make) cell.append(make(item));
      return cell;
    });
    return el("tr", { role: "row" }, ...cells);
  }

  updateRow(row, item) {
    this.columns.forEach(({ text, update }, i) => {
      const cell = row.children[i];
      if (text) setText(cell, String(text(item)));
      else update?.(cell.firstElementChild, item);
    });
  }
}

export const LEVELS = { serving: "good", draining: "soft", failing: "bad", loading: "soft", unloading: "soft", failed: "bad" };

const hidden = (text) => el("span", { class: "hidden" }, text);

// A word with a colour that says the same.
export function badge(word, level) {
  return el("span", { class: `badge ${level}` }, word);
}

export function setBadge(node, word, level) {
  setText(node, word);
  node.className = `badge ${level}`;
}
