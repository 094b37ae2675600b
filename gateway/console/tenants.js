// Tenants: shares, limits, queues, and what they used. Without an administrator's key only one's own.
import { bar, drawBar } from "./drawing.js";
import { el, openDialog, setText, smallButton } from "./dom.js";
import { count } from "./format.js";
import { call } from "./session.js";
import { LiveTable } from "./table.js";
import { LIMITS, addTenant, changeTenant, removeTenant, showKeys } from "./tenant_forms.js";

export class TenantsView {
  constructor() {
    this.title = "Tenants";
    this.note = el("p", { class: "note" });
    this.notice = el("p", { role: "status", class: "notice" });
    const say = (text) => setText(this.notice, text);
    this.add = el("button", { type: "button", class: "quiet", onclick: () => addTenant(say) }, "Add a tenant");
    this.table = tenantTable(say);
    this.element = el("div", {}, this.note, this.table.element, this.notice, this.add);
  }

  update({ tenants, caller }) {
    const all = "Figures are those of all gateways, each since it started; usage by day is kept by the cluster.";
    this.add.hidden = !(caller.is_admin && caller.has_keys);
    setText(this.note, caller.is_admin ? all : `You see ${caller.name} alone: this needs an administrator's key to show all.`);
    const given = tenants.reduce((sum, row) => sum + row.output_tokens, 0);
    this.table.update(tenants.map((row) => ({ ...row, given, isAdmin: caller.is_admin && caller.has_keys })));
  }
}

function limitsOf(limits) {
  const reported = Object.entries(LIMITS)
    .filter(([name]) => limits[name] !== undefined)
    .map(([name, [unit]]) => `${count(limits[name])} ${unit}${name === "budget" ? ` a ${limits.budget_period ?? "month"}` : ""}`);
  return reported.join(", ");
}

function allLimits({ limits, models }) {
  const byModel = Object.entries(models).map(([model, each]) => `${model}: ${limitsOf(each)}`);
  return [limitsOf(limits), ...byModel].filter(Boolean).join("; ") || "none";
}

function tenantTable(say) {
  return new LiveTable(
    "Tenants",
    (row) => row.key,
    [
      { title: "tenant", text: (row) => row.id, head: true },
      { title: "weight", text: (row) => row.weight, numeric: true },
      { title: "tier", text: (row) => row.tier, numeric: true },
      { title: "running", text: (row) => count(row.num_running), numeric: true },
      { title: "waiting", text: (row) => count(row.num_waiting), numeric: true },
      { title: "prompt tokens", text: (row) => `${count(row.prompt_tokens)} (${count(row.cached_tokens)} cached)`, numeric: true },
      {
        title: "answered tokens",
        make: () => el("div", { class: "with-bar" }, el("span"), bar("bar-used")),
        update: (node, row) => {
          setText(node.children[0], count(row.output_tokens));
          drawBar(node.children[1], row.given, row.output_tokens);
        },
      },
      { title: "limits", text: allLimits },
      { title: "", make: (row) => actions(row, say), update: showActions },
    ],
    "No tenant was seen yet.",
  );
}

function actions({ id }, say) {
  const node = el(
    "div",
    { class: "row-actions" },
    smallButton("Usage", `Usage of ${id} by day`, () => showUsage(id)),
    smallButton("Keys", `Keys of ${id}`, () => showKeys(id)),
    smallButton("Change", `Change ${id}`, () => changeTenant(node.row, say)),
    smallButton("Remove", `Remove ${id}`, () => removeTenant(id, say)),
  );
  return node;
}

function showActions(node, row) {
  node.row = row;
  node.hidden = !(row.isAdmin && row.is_kept);
}

async function showUsage(id) {
  const table = new LiveTable(
    `Usage of ${id}`,
    (row) => `${row.day} ${row.model}`,
    [
      { title: "day", text: (row) => row.day, head: true },
      { title: "model", text: (row) => row.model },
      ...["requests", "prompt_tokens", "cached_tokens", "output_tokens"].map((name) => ({
        title: name.replace("_", " "),
        text: (row) => count(row[name]),
        numeric: true,
      })),
    ],
    "Nothing in the last 31 days.",
  );
  try {
    table.update((await call("GET", `/admin/tenants/${encodeURIComponent(id)}/usage`)).data);
    openDialog(`Usage of ${id}`, table.element);
  } catch (error) {
    openDialog(`Usage of ${id}`, el("p", { class: "failed" }, error.message));
  }
}
