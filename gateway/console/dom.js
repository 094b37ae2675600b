// Elements without markup: every text becomes a text node, so nothing that a server or a model says is read as HTML.
export const find = (id) => document.getElementById(id);

// Attributes by name; `on…` takes a listener, and null, undefined or false leaves an attribute out.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Leaves a node alone whose text is the same, so that selections and screen readers are not disturbed.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// One node an item, kept by key while the item is there: whoever has the focus in it keeps it.
export function syncNodes(parent, items, key, create, update) {
  const before = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = before.get(name);
    before.delete(name);
    if (!node) {
      node = create(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of before.values()) node.remove();
}

// A heading, what it is about, and its contents.
export function section(title, note, ...children) {
  const heading = el("h3", {}, title);
  return el("section", { class: "block" }, heading, note ? el("p", { class: "note" }, note) : null, ...children);
}

let dialogs = 0;
// A modal box that is gone when it closes; `buttons` come before the one that closes.
export function openDialog(title, body, ...buttons) {
  const id = `dialog-${(dialogs += 1)}`;
  const close = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
  const dialog = el(
    "dialog",
    { "aria-labelledby": id, onclose: () => dialog.remove() },
    el("h2", { id }, title),
    body,
    el("div", { class: "actions" }, ...buttons, close),
  );
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// Resolves to true when the person agrees.
export function confirmed(title, text, action) {
  return new Promise((resolve) => {
    let agreed = false;
    const agree = el(
      "button",
      {
        type: "button",
        onclick: () => {
          agreed = true;
          dialog.close();
        },
      },
      action,
    );
    const dialog = openDialog(title, el("p", {}, text), agree);
    dialog.addEventListener("close", () => resolve(agreed));
  });
}
