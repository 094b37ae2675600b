// Which requests the tables show: by tenant, model, engine and id, those that failed, those that take long.
import { choice, el } from "./dom.js";

const SLOW_SECONDS = 5;
const KINDS = [
  ["", "all"],
  ["failed", "failed"],
  ["slow", `${SLOW_SECONDS} s or longer`],
];

export class RequestFilter {
  constructor(changed) {
    this.tenant = choice("Tenant", { onchange: changed }, []);
    this.model = choice("Model", { onchange: changed }, []);
    this.kind = choice("Which", { onchange: changed }, KINDS);
    this.text = el("input", { type: "search", placeholder: "id or engine", oninput: changed });
    this.element = el(
      "section",
      { class: "filter", "aria-label": "Filter of requests" },
      this.tenant,
      this.model,
      this.kind,
      el("label", {}, "Contains", this.text),
    );
  }

  update(rows, isAdmin) {
    this.tenant.hidden = !isAdmin;
    refill(this.tenant.lastElementChild, rows.map(({ tenant }) => tenant));
    refill(this.model.lastElementChild, rows.map(({ model }) => model));
  }

  fits({ id, tenant, model, replica, state, seconds }) {
    const [who, what, kind] = [this.tenant, this.model, this.kind].map((each) => each.lastElementChild.value);
    const text = this.text.value.trim().toLowerCase();
    return (
      (!who || who === tenant) &&
      (!what || what === model) &&
      (kind !== "failed" || state === "error") &&
      (kind !== "slow" || (seconds.total ?? 0) >= SLOW_SECONDS) &&
      // The ids that APIs answer with have a word before: cmpl-…
      (!text || text.endsWith(id) || `${id} ${replica ?? ""}`.toLowerCase().includes(text))
    );
  }
}

// Names that were seen stay choices: requests end, and a choice that vanished would choose another.
function refill(select, names) {
  const known = [...select.options].map(({ value }) => value).filter(Boolean);
  const all = [...new Set([...known, ...names])].sort();
  if (all.length === known.length && select.options.length) return;
  const chosen = select.value;
  select.replaceChildren(new Option("all", ""), ...all.map((name) => new Option(name, name, false, name === chosen)));
}
