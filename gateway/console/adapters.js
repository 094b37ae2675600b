// Adapters of the models: what is loaded for whom, loading and unloading.
import { askForm, confirmed, el, field, section, smallButton } from "./dom.js";
import { count } from "./format.js";
import { call } from "./session.js";
import { LiveTable } from "./table.js";

export class Adapters {
  // `say` tells the person how something ended.
  constructor(say) {
    this.say = say;
    this.table = new LiveTable(
      "Adapters",
      (row) => `${row.owner ?? ""} ${row.id}`,
      [
        { title: "adapter", text: (row) => row.id, head: true },
        { title: "base model", text: (row) => row.base },
        { title: "rank", text: (row) => (row.rank === undefined ? "–" : count(row.rank)), numeric: true },
        { title: "tenants", text: tenantsOf },
        { title: "engines", text: (row) => (row.replicas === undefined ? "–" : `${row.replicas}, ${row.on_device} on device`) },
        {
          title: "",
          make: (row) => el("div", { class: "row-actions" }, smallButton("Unload", `Unload ${row.id}`, () => this.unload(row.id))),
          // A tenant's own adapter is the tenant's to remove.
          update: (node, row) => {
            node.hidden = row.owner !== null || row.replicas === undefined;
          },
        },
      ],
      "No adapter is loaded.",
    );
    this.load = el("button", { type: "button", class: "quiet", onclick: () => this.ask() }, "Load an adapter");
    this.element = section("Adapters", "", this.table.element, this.load);
  }

  update(rows, models, { is_admin: isAdmin }) {
    this.models = models.map(({ id }) => id);
    this.load.hidden = !isAdmin;
    this.table.update(rows);
  }

  ask() {
    const load = async ({ tenants, ...fields }) => {
      const named = tenants === undefined ? {} : { tenants: tenants.split(/[\s,]+/).filter(Boolean) };
      const card = await call("POST", "/admin/adapters", { ...fields, ...named });
      this.say(`the adapter ${card.id} is served by ${card.replicas.join(", ") || "engines that start"}`);
    };
    askForm(
      "Load an adapter",
      "Load",
      load,
      field("Name", { name: "name", required: true }),
      field("Folder on the hosts of the engines", { name: "folder", required: true, placeholder: "/adapters/support" }),
      field("Base model", { name: "base", placeholder: "the only one" }),
      field("Tenants, with commas between", { name: "tenants", placeholder: "all" }),
    );
  }

  async unload(id) {
    if (!(await confirmed(`Unload ${id}?`, "New requests no longer get it; running ones keep it to their end.", "Unload"))) return;
    try {
      await call("DELETE", `/admin/adapters/${encodeURIComponent(id)}`);
      this.say(`the adapter ${id} is unloaded`);
    } catch (error) {
      this.say(error.message);
    }
  }
}

function tenantsOf({ owner, tenants }) {
  // A tenant sees neither.
  if (owner) return `its own: ${owner}`;
  if (tenants === undefined) return "–";
  return tenants === null ? "all" : tenants.join(", ");
}
