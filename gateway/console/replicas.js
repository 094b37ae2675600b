// Replicas: the engines with what they report, and taking one out of service.
import { confirmed, el, setText } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { LEVELS } from "./live.js";
import { call } from "./session.js";
import { LiveTable, badge, setBadge } from "./table.js";

export class ReplicasView {
  constructor() {
    this.title = "Replicas";
    this.said = el("p", { role: "status", class: "said" });
    this.table = replicaTable((id) => this.drain(id));
    this.element = el("div", {}, this.table.element, this.said);
  }

  update({ replicas }) {
    this.table.update(replicas ?? []);
  }

  async drain(id) {
    const text = `${id} takes nothing new. What it runs has 30 seconds, then goes on elsewhere where that is possible. A supervisor starts another engine in its place.`;
    if (!(await confirmed(`Drain ${id}?`, text, "Drain"))) return;
    setText(this.said, `${id} drains`);
    try {
      const told = await call("POST", `/admin/replicas/${encodeURIComponent(id)}/drain`, {});
      setText(this.said, `${id} has drained: ${told.num_finished} ended by themselves, ${told.num_cancelled} were handed over`);
    } catch (error) {
      setText(this.said, error.message);
    }
  }
}

function replicaTable(drain) {
  return new LiveTable(
    "Engines in detail",
    (row) => `${row.id} ${row.epoch}`,
    [
      { title: "engine", text: (row) => row.id, head: true },
      { title: "model", text: (row) => row.model },
      { title: "address", text: (row) => row.address },
      { title: "state", make: () => badge("", ""), update: (node, row) => setBadge(node, row.state, LEVELS[row.state]) },
      { title: "running", text: (row) => count(row.num_running), numeric: true },
      { title: "waiting", text: (row) => count(row.num_waiting), numeric: true },
      { title: "tokens/s", text: (row) => rate(row.tokens), numeric: true },
      { title: "step", text: (row) => (row.step_seconds ? seconds(row.step_seconds) : "–"), numeric: true },
      { title: "KV blocks", text: (row) => `${count(row.num_used_blocks)} of ${count(row.num_total_blocks)}`, numeric: true },
      { title: "cache hits", text: (row) => percent(row.prefix_hits, row.prefix_queries), numeric: true },
      { title: "heard", text: (row) => (row.load_age < 0 ? "never" : `${seconds(row.load_age)} ago`), numeric: true },
      {
        title: "",
        make: ({ id }) =>
          el("button", { type: "button", class: "quiet small", "aria-label": `Drain ${id}`, onclick: () => drain(id) }, "Drain"),
        update: (node, row) => {
          node.disabled = row.state === "draining";
        },
      },
    ],
    "No engine is there.",
  );
}
