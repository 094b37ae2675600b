// Batches and files of a tenant: upload, start, progress, cancel, download.
import { bar, drawBar } from "./drawing.js";
import { choice, confirmed, el, field, section, setText, smallButton } from "./dom.js";
import { count } from "./format.js";
import { call, headers, refusal, root } from "./session.js";
import { LiveTable, badge, setBadge } from "./table.js";

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
const LEVELS = { completed: "good", failed: "bad", expired: "bad", cancelled: "soft" };
const OVER = ["completed", "failed", "expired", "cancelled"];
const PAUSE_MS = 2000;

export class BatchesView {
  constructor() {
    this.title = "Batches";
    this.notice = el("p", { role: "status", class: "notice" });
    this.tenant = field("In the name of the tenant", { placeholder: "the administrators' own", onchange: () => this.read() });
    this.tenant.classList.add("tenant-field");
    this.file = field("Requests, a JSON object a line", { type: "file", accept: ".jsonl,application/jsonl", required: true });
    this.endpoint = choice("Endpoint", {}, ENDPOINTS.map((each) => [each, each]));
    this.form = el("form", { class: "fields", onsubmit: (event) => this.start(event) }, this.file, this.endpoint, el("button", { type: "submit" }, "Start a batch"));
    this.batches = this.batchTable();
    this.files = this.fileTable();
    this.element = el(
      "div",
      {},
      this.tenant,
      section("New batch", "Each line has custom_id, method, url and body.", this.form, this.notice),
      section("Batches", "", this.batches.element),
      section("Files", "", this.files.element),
    );
    this.readAt = 0;
  }

  // Read while it is shown alone.
  update({ caller }) {
    this.tenant.hidden = !(caller.is_admin && caller.has_keys);
    if (this.element.isConnected && Date.now() - this.readAt > PAUSE_MS) this.read();
  }

  get named() {
    const name = this.tenant.lastElementChild.value.trim();
    return name && !this.tenant.hidden ? { "x-tenant": name } : {};
  }

  async read() {
    this.readAt = Date.now();
    try {
      const [batches, files] = await Promise.all(["/v1/batches", "/v1/files"].map((path) => call("GET", path, undefined, this.named)));
      this.batches.update(batches.data);
      this.files.update(files.data);
    } catch (error) {
      setText(this.notice, error.message);
    }
  }

  async start(event) {
    event.preventDefault();
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", this.file.lastElementChild.files[0]);
    await this.attempt(async () => {
      const sent = await fetch(`${root}/v1/files`, { method: "POST", headers: { ...headers(), ...this.named }, body: form });
      if (!sent.ok) throw await refusal(sent);
      const { id } = await sent.json();
      const asked = { input_file_id: id, endpoint: this.endpoint.lastElementChild.value, completion_window: "24h" };
      const batch = await call("POST", "/v1/batches", asked, this.named);
      this.form.reset();
      return `${batch.id} has started`;
    });
  }

  async attempt(work) {
    try {
      setText(this.notice, await work());
    } catch (error) {
      setText(this.notice, error.message);
    }
    await this.read();
  }

  async cancel(id) {
    if (!(await confirmed(`Cancel ${id}?`, "Answers that are there stay.", "Cancel the batch"))) return;
    await this.attempt(async () => `${(await call("POST", `/v1/batches/${id}/cancel`, {}, this.named)).id} ends`);
  }

  async download(id, name) {
    await this.attempt(async () => {
      const response = await fetch(`${root}/v1/files/${id}/content`, { headers: { ...headers(), ...this.named } });
      if (!response.ok) throw await refusal(response);
      const url = URL.createObjectURL(await response.blob());
      el("a", { href: url, download: name }).click();
      URL.revokeObjectURL(url);
      return `${name} is saved`;
    });
  }

  async remove(id) {
    if (!(await confirmed("Delete the file?", "It cannot be brought back.", "Delete"))) return;
    await this.attempt(async () => `${(await call("DELETE", `/v1/files/${id}`, undefined, this.named)).id} is deleted`);
  }

  batchTable() {
    return new LiveTable(
      "Batches",
      ({ id }) => id,
      [
        { title: "batch", make: ({ id }) => el("code", { class: "id", title: id }, id), head: true },
        { title: "endpoint", text: ({ endpoint }) => endpoint },
        { title: "status", make: () => badge("", ""), update: (node, { status }) => setBadge(node, status, LEVELS[status] ?? "soft") },
        {
          title: "progress",
          make: () => el("div", { class: "with-bar" }, el("span"), bar("bar-used")),
          update: (node, row) => {
            const { total, completed, failed } = row.request_counts;
            const fault = row.errors?.data?.[0]?.message ?? "";
            setText(node.children[0], fault || `${count(completed)} of ${count(total)}${failed ? `, ${count(failed)} failed` : ""}`);
            drawBar(node.children[1], total, completed + failed);
          },
        },
        { title: "started", text: ({ created_at: at }) => when(at) },
        { title: "", make: (row) => this.actions(row), update: showActions },
      ],
      "No batch yet.",
    );
  }

  actions(row) {
    const output = smallButton("Answers", `Download the answers of ${row.id}`, () => this.download(output.dataset.file, `${row.id}.jsonl`));
    const faults = smallButton("Errors", `Download the errors of ${row.id}`, () => this.download(faults.dataset.file, `${row.id}-errors.jsonl`));
    return el("div", { class: "row-actions" }, output, faults, smallButton("Cancel", `Cancel ${row.id}`, () => this.cancel(row.id)));
  }

  fileTable() {
    const download = ({ id, filename }) => smallButton("Download", `Download ${filename}`, () => this.download(id, filename));
    const remove = ({ id, filename }) => smallButton("Delete", `Delete ${filename}`, () => this.remove(id));
    return new LiveTable(
      "Files",
      ({ id }) => id,
      [
        { title: "file", text: ({ filename }) => filename, head: true },
        { title: "purpose", text: ({ purpose }) => purpose },
        { title: "bytes", text: ({ bytes }) => count(bytes), numeric: true },
        { title: "since", text: ({ created_at: at }) => when(at) },
        { title: "", make: (row) => el("div", { class: "row-actions" }, download(row), remove(row)) },
      ],
      "No file yet.",
    );
  }
}

const when = (at) => new Date(at * 1000).toLocaleString("en-GB");

function showActions(node, row) {
  const [output, faults, cancel] = node.children;
  for (const [button, file] of [
    [output, row.output_file_id],
    [faults, row.error_file_id],
  ]) {
    button.hidden = !file;
    button.dataset.file = file ?? "";
  }
  cancel.hidden = OVER.includes(row.status);
}
