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
  const heading = el("h2", {}, title);
  return el("section", { class: "block" }, heading, note ? el("p", { class: "note" }, note) : null, ...children);
}

// A button of a row: its name says what it is about to those who hear it alone.
export function smallButton(text, name, act) {
  return el("button", { type: "button", class: "quiet small", "aria-label": name, onclick: act }, text);
}

// A labelled input.
export function field(label, attributes) {
  return el("label", {}, label, el("input", attributes));
}

export function choice(label, attributes, options) {
  return el("label", {}, label, el("select", attributes, ...options.map(([value, text]) => el("option", { value }, text))));
}

// What a form says, without fields that are empty; numbers as numbers.
export function given(form) {
  const fields = [...form.elements].filter(({ name, value }) => name && value !== "");
  return Object.fromEntries(fields.map(({ name, type, value }) => [name, type === "number" ? Number(value) : value]));
}

// Facts by name.
export function factsList(facts) {
  const pairs = Object.entries(facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]);
  return el("dl", { class: "facts-list" }, ...pairs);
}

let dialogs = 0;

// Asks for what a form holds; `work` takes its fields, and the dialog stays while it refuses them.
export function askForm(title, action, work, ...fields) {
  const problem = el("p", { class: "failed", role: "alert" });
  const id = `form-${(dialogs += 1)}`;
  const form = el("form", { id }, el("div", { class: "fields" }, ...fields), problem);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await work(given(form), form);
      dialog.close();
    } catch (error) {
      setText(problem, error.message);
    }
  });
  // Of the form, though it stands outside: the Enter key presses it.
  const dialog = openDialog(title, form, el("button", { type: "submit", form: id }, action));
  return dialog;
}

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
