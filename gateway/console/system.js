// System: processes and their versions, NATS, Redis and disks with their fill, settings in force, what administrators
// did, and the processes' last log lines.
import { bar, drawBar } from "./drawing.js";
import { choice, el, field, section, setText } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { call } from "./session.js";
import { LEVELS, LiveTable, badge, setBadge } from "./table.js";

const PAUSE_MS = 5000;

export class SystemView {
  constructor() {
    this.title = "System";
    this.versions = el("p", { class: "note" });
    this.processes = processTable();
    this.stores = storeTable();
    this.settings = new Part("Settings in force", "Secrets are shown as “set”. Of `headwater up`, and of each gateway.", "/admin/configuration", settingTable());
    this.audit = new Part("What administrators did", "The last 31 days.", "/admin/audit", auditTable(), (rows) => rows.reverse());
    this.logs = new LogDrawer();
    this.storesNotice = el("p", { role: "status", class: "notice" });
    this.element = el(
      "div",
      {},
      section("Processes", "", this.versions, this.processes.element),
      section("Stores and disks", "", this.stores.element, this.storesNotice),
      this.logs.element,
      this.settings.element,
      this.audit.element,
    );
    this.readAt = 0;
  }

  update({ stages, replicas, caller }) {
    if (!caller.is_admin) return;
    const rows = [...stages, ...replicas.map((row) => ({ ...row, kind: "engine" }))];
    this.processes.update(rows);
    const versions = new Set(rows.map(({ version }) => version));
    setText(this.versions, versions.size > 1 ? `${versions.size} versions run: each works with the one before it.` : `All run ${[...versions][0] || "an unknown version"}.`);
    this.logs.offer(caller);
    if (this.element.isConnected && Date.now() - this.readAt > PAUSE_MS) this.read();
  }

  async read() {
    this.readAt = Date.now();
    try {
      const { data, note } = await call("GET", "/admin/stores");
      this.stores.update(data);
      setText(this.storesNotice, note);
    } catch (error) {
      setText(this.storesNotice, error.message);
    }
  }
}

// Rows that are read when a person opens them.
class Part {
  constructor(title, note, path, table, order = (rows) => rows) {
    Object.assign(this, { path, table, order });
    this.text = field("Contains", { type: "search", oninput: () => this.show() });
    this.notice = el("p", { role: "status", class: "notice" });
    this.rows = [];
    this.element = el("details", { class: "block", ontoggle: () => this.read() }, el("summary", {}, title), el("p", { class: "note" }, note), this.text, table.element, this.notice);
  }

  async read() {
    if (!this.element.open) return;
    try {
      this.rows = this.order((await call("GET", this.path)).data).map((row, number) => ({ ...row, number }));
      setText(this.notice, "");
    } catch (error) {
      setText(this.notice, error.message);
    }
    this.show();
  }

  show() {
    const sought = this.text.lastElementChild.value.trim().toLowerCase();
    this.table.update(this.rows.filter((row) => JSON.stringify(row).toLowerCase().includes(sought)));
  }
}

class LogDrawer {
  constructor() {
    this.process = choice("Process", { onchange: () => this.read() }, []);
    this.text = field("Contains", { type: "search", oninput: () => this.show() });
    this.lines = el("pre", { class: "log-lines", tabindex: "0", "aria-label": "Log lines" });
    this.notice = el("p", { role: "status", class: "notice" });
    this.known = [];
    const again = el("button", { type: "button", class: "quiet", onclick: () => this.read() }, "Read again");
    this.element = el(
      "details",
      { class: "block", ontoggle: () => this.open() },
      el("summary", {}, "Log lines"),
      el("div", { class: "filter" }, this.process, this.text, again),
      this.notice,
      this.lines,
    );
  }

  offer({ is_admin: isAdmin }) {
    this.element.hidden = !isAdmin;
  }

  async open() {
    if (!this.element.open) return;
    try {
      const select = this.process.lastElementChild;
      const chosen = select.value;
      const names = (await call("GET", "/admin/logs")).data;
      select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
      await this.read();
    } catch (error) {
      setText(this.notice, error.message);
    }
  }

  async read() {
    const name = this.process.lastElementChild.value;
    if (!name) return;
    try {
      this.known = (await call("GET", `/admin/logs/${encodeURIComponent(name)}`)).data;
      setText(this.notice, "");
    } catch (error) {
      this.known = [];
      setText(this.notice, error.message);
    }
    this.show();
    this.lines.scrollTop = this.lines.scrollHeight;
  }

  show() {
    const sought = this.text.lastElementChild.value.trim().toLowerCase();
    setText(this.lines, this.known.filter((line) => line.toLowerCase().includes(sought)).join("\n") || "No line.");
  }
}

function processTable() {
  return new LiveTable(
    "Processes",
    (row) => `${row.kind} ${row.id} ${row.address}`,
    [
      { title: "process", text: (row) => row.id, head: true },
      { title: "stage", text: (row) => row.kind.replace("_", " ") },
      { title: "version", text: (row) => row.version || "–" },
      { title: "address", text: (row) => [row.rest_url, row.address].filter(Boolean).join(" ") },
      { title: "state", make: () => badge("", ""), update: (node, row) => setBadge(node, row.state, LEVELS[row.state] ?? "soft") },
    ],
    "No process is there.",
  );
}

const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(1)} MB`);

function storeTable() {
  return new LiveTable(
    "Stores and disks",
    (row) => `${row.kind} ${row.name}`,
    [
      { title: "store", text: (row) => row.name, head: true },
      { title: "kind", text: (row) => row.kind },
      {
        title: "fill",
        make: () => el("div", { class: "with-bar" }, el("span"), bar("bar-used")),
        update: (node, row) => {
          const whole = row.total_bytes ? ` of ${bytes(row.total_bytes)}, ${percent(row.used_bytes, row.total_bytes)}` : ", no bound";
          setText(node.children[0], row.problem || `${bytes(row.used_bytes)}${whole}`);
          drawBar(node.children[1], row.total_bytes ?? 0, row.used_bytes);
        },
      },
      { title: "messages or keys", text: (row) => (row.num_items === null ? "–" : count(row.num_items)), numeric: true },
      { title: "answers in", text: (row) => seconds(row.seconds), numeric: true },
    ],
    "This gateway has neither NATS nor Redis.",
  );
}

function settingTable() {
  return new LiveTable(
    "Settings in force",
    (row) => row.number,
    [
      { title: "setting", text: (row) => row.name, head: true },
      { title: "value", text: (row) => row.value },
      { title: "from", text: (row) => row.source },
      { title: "of", text: (row) => row.process },
    ],
    "None is known.",
  );
}

function auditTable() {
  return new LiveTable(
    "Audit log",
    (row) => row.number,
    [
      { title: "at", text: (row) => new Date(row.at * 1000).toLocaleString("en-GB"), head: true },
      { title: "administrator", text: (row) => row.admin },
      { title: "action", text: (row) => row.action },
      { title: "tenant", text: (row) => row.tenant || "–" },
      { title: "change", text: (row) => JSON.stringify(row.change) },
    ],
    "Nothing was changed.",
  );
}
