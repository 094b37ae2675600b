// The engines of a cluster: what each does, its details, and taking one out of service.
import { bar, drawBar, drawSparkline, sparkline } from "./drawing.js";
import { confirmed, el, factsList, openDialog, setText, smallButton } from "./dom.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { call } from "./session.js";
import { LEVELS, LiveTable, badge, setBadge } from "./table.js";

// KV blocks: held by requests, and cached beyond that.
const cachedOnly = (row) => Math.max(0, Math.min(row.num_cached_blocks, row.num_total_blocks) - row.num_used_blocks);

function kvText(row) {
  const host = row.num_total_host_blocks ? `, host ${percent(row.num_used_host_blocks, row.num_total_host_blocks)}` : "";
  const disk = row.num_total_disk_bytes ? `, disk ${percent(row.num_used_disk_bytes, row.num_total_disk_bytes)}` : "";
  return `${percent(row.num_used_blocks, row.num_total_blocks)} used, ${percent(cachedOnly(row), row.num_total_blocks)} cached${host}${disk}`;
}

// Memory of the KV cache that requests hold, by kind of layer, and that cached states take.
const memoryText = (row) => Object.entries(row.kv_bytes).map(([kind, size]) => `${kind} ${bytes(size)}`).join(", ") || "–";

const hitText = (row) => `${percent(row.cached_tokens, row.routed_tokens)} of ${percent(row.predicted_tokens, row.routed_tokens)} predicted`;

// What the gateways think of a replica; each by its name where they differ.
function trustText({ gateways }) {
  const reported = Object.entries(gateways).map(([name, { trust, is_synced: isSynced }]) => ({
    name,
    text: `${Math.round(trust * 100)} %${isSynced ? "" : ", index behind"}`,
  }));
  const texts = new Set(reported.map(({ text }) => text));
  return texts.size > 1 ? reported.map(({ name, text }) => `${text} at ${name}`).join("; ") : (reported[0]?.text ?? "–");
}

export class EngineTable {
  constructor() {
    this.rows = new Map();
    this.notice = el("p", { role: "status", class: "notice" });
    this.table = this.makeTable();
    this.element = el("div", {}, this.table.element, this.notice);
  }

  update(rows) {
    this.rows = new Map(rows.map((row) => [row.id, row]));
    this.table.update(rows);
  }

  makeTable() {
    return new LiveTable(
      "Engines",
      (row) => `${row.id} ${row.epoch}`,
      [
        { title: "engine", text: (row) => row.id, head: true },
        { title: "model", text: (row) => row.model },
        { title: "state", make: (row) => badge(row.state, ""), update: (node, row) => setBadge(node, row.state, LEVELS[row.state]) },
        { title: "running", text: (row) => count(row.num_running), numeric: true },
        { title: "waiting", text: (row) => count(row.num_waiting), numeric: true },
        {
          title: "tokens/s",
          numeric: true,
          make: () => el("div", { class: "with-spark" }, el("span"), sparkline()),
          update: (node, row) => {
            setText(node.children[0], rate(row.tokens));
            drawSparkline(node.children[1], row.past);
          },
        },
        {
          title: "KV cache",
          make: () => el("div", { class: "with-bar" }, el("span"), bar("bar-used", "bar-cached")),
          update: (node, row) => {
            setText(node.children[0], kvText(row));
            drawBar(node.children[1], row.num_total_blocks, row.num_used_blocks, cachedOnly(row));
          },
        },
        { title: "found cached", text: hitText },
        { title: "trust", text: trustText },
        {
          title: "",
          make: ({ id }) =>
            el(
              "div",
              { class: "row-actions" },
              smallButton("Details", `Details of ${id}`, () => this.show(id)),
              smallButton("Drain", `Drain ${id}`, () => this.drain(id)),
            ),
          update: (node, row) => {
            node.lastElementChild.disabled = row.state === "draining";
          },
        },
      ],
      "No engine is there.",
    );
  }

  show(id) {
    const row = this.rows.get(id);
    if (!row) return;
    const facts = {
      address: row.address,
      version: row.version || "–",
      "step, each token": row.step_seconds ? seconds(row.step_seconds) : "–",
      "KV blocks": `${count(row.num_used_blocks)} of ${count(row.num_total_blocks)}, ${count(row.block_size)} tokens each`,
      "KV memory held": memoryText(row),
      "weights held on the device": row.num_held_bytes ? bytes(row.num_held_bytes) : "–",
      "prefix hits": percent(row.prefix_hits, row.prefix_queries),
      "last report": row.load_age < 0 ? "none" : `${seconds(row.load_age)} ago`,
      "goes without": row.without.join(", ") || "nothing",
      epoch: row.epoch,
    };
    openDialog(`Engine ${id}`, factsList(facts));
  }

  async drain(id) {
    const text = `${id} takes nothing new. What it runs has 30 seconds, then goes on elsewhere where that is possible. A supervisor starts another engine in its place.`;
    if (!(await confirmed(`Drain ${id}?`, text, "Drain"))) return;
    setText(this.notice, `${id} drains`);
    try {
      const reported = await call("POST", `/admin/replicas/${encodeURIComponent(id)}/drain`, {});
      setText(this.notice, `${id} has drained: ${reported.num_finished} ended by themselves, ${reported.num_cancelled} were handed over`);
    } catch (error) {
      setText(this.notice, error.message);
    }
  }
}
