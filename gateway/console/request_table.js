// Requests with their timelines, and the explanation of one.
import { bar, drawBar } from "./drawing.js";
import { el, openDialog, setText } from "./dom.js";
import { count, seconds } from "./format.js";
import { PHASES, phases } from "./phases.js";
import { call } from "./session.js";
import { LiveTable, badge, setBadge } from "./table.js";

const STATES = { decode: "good", done: "good", error: "bad", cancelled: "soft" };
export class RequestTable {
  constructor(caption, empty) {
    this.table = new LiveTable(
      caption,
      (row) => row.key,
      [
        { title: "request", make: (row) => el("code", { class: "id", title: row.id }, row.id), head: true },
        { title: "tenant", text: (row) => row.tenant },
        { title: "model", text: (row) => row.model },
        { title: "state", make: () => badge("", ""), update: (node, row) => setBadge(node, row.state, STATES[row.state] ?? "soft") },
        { title: "gateway", text: (row) => row.gateway },
        { title: "engine", text: (row) => row.replica ?? "–" },
        {
          title: "prompt",
          text: (row) => `${count(row.prompt_tokens)}${row.cached_tokens ? ` (${count(row.cached_tokens)} cached)` : ""}`,
          numeric: true,
        },
        { title: "answer", text: (row) => count(row.output_tokens), numeric: true },
        { title: "timeline", make: makeTimeline, update: updateTimeline },
        { title: "", make: (row) => explainButton(row) },
      ],
      empty,
    );
    this.element = this.table.element;
  }

  update(rows) {
    const seen = new Map();
    this.table.update(
      rows.map((row) => {
        // A request has a row for each of its prompts.
        const number = (seen.get(row.id) ?? 0) + 1;
        seen.set(row.id, number);
        return { ...row, key: `${row.id} ${number}` };
      }),
    );
  }
}

function makeTimeline() {
  return el("div", { class: "with-bar" }, el("span"), bar(...PHASES.map((phase) => `bar-${phase.replace(" ", "-")}`)));
}

function updateTimeline(node, row) {
  const reported = phases(row);
  const words = PHASES.map((phase, i) => (reported[i] >= 0.0005 ? `${phase} ${seconds(reported[i])}` : null)).filter(Boolean);
  setText(node.children[0], words.join(", ") || "–");
  drawBar(node.children[1], reported.reduce((a, b) => a + b, 0), ...reported);
}

function explainButton({ id, tenant }) {
  const button = el("button", { type: "button", class: "quiet small", "aria-label": `Explain request ${id}` }, "Explain");
  button.addEventListener("click", () => explain(id, tenant));
  return button;
}

// An administrator asks in the tenant's name; for others the header changes nothing.
async function explain(id, tenant) {
  const named = tenant === "open" || tenant === "admin" ? {} : { "x-tenant": tenant };
  try {
    const reported = await call("GET", `/v1/requests/${encodeURIComponent(id)}/explain`, undefined, named);
    openDialog(`Request ${id}`, explanation(reported));
  } catch (error) {
    openDialog(`Request ${id}`, el("p", { class: "failed" }, error.message));
  }
}

function explanation(reported) {
  const prompts = reported.prompts.map((prompt, i) =>
    el(
      "section",
      {},
      el("h3", {}, reported.prompts.length > 1 ? `Prompt ${i + 1}: ${prompt.outcome}` : prompt.outcome),
      el("dl", { class: "facts-list" }, ...Object.entries(prompt.seconds).flatMap(([name, value]) => fact(name.replaceAll("_", " "), seconds(value)))),
      ...prompt.attempts.map((attempt, n) => attemptOf(attempt, n + 1)),
    ),
  );
  const all = el("details", {}, el("summary", {}, "All of it, as JSON"), el("pre", { tabindex: "0" }, JSON.stringify(reported, null, 2)));
  return el("div", {}, ...prompts, all);
}

function attemptOf({ decision, error }, number) {
  const found = decision.actual_cached_tokens ?? "not yet known";
  const text = `${decision.replica_id}, by ${decision.reason}; ${decision.predicted_cached_tokens} of ${decision.prompt_tokens} prompt tokens predicted cached, found: ${found}`;
  return el("p", {}, `Attempt ${number}: ${text}${error ? `; ended by: ${error}` : ""}`);
}

const fact = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
