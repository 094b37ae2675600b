// Models: what is served, loading one with its progress, how many engines it has, unloading.
import { Adapters } from "./adapters.js";
import { bar, drawBar } from "./drawing.js";
import { askForm, confirmed, el, field, given, section, setText, smallButton } from "./dom.js";
import { count, percent } from "./format.js";
import { MemoryCalculator } from "./memory_calculator.js";
import { ModelSettings } from "./model_settings.js";
import { call } from "./session.js";
import { LEVELS, LiveTable, badge, setBadge } from "./table.js";

const path = (id) => `/admin/models/${encodeURIComponent(id)}`;

export class ModelsView {
  constructor() {
    this.title = "Models";
    this.notice = el("p", { role: "status", class: "notice" });
    this.table = modelTable((text) => setText(this.notice, text));
    this.form = section("Load a model", "Beside those that are served; it is downloaded and converted first.", this.makeForm());
    this.adapters = new Adapters((text) => setText(this.notice, text));
    this.calculator = new MemoryCalculator();
    this.element = el("div", {}, this.table.element, this.notice, this.form, this.adapters.element, this.calculator.element);
  }

  update({ models, adapters = [], caller }) {
    this.adapters.update(adapters, models, caller);
    this.form.hidden = !caller.is_admin;
    this.table.update(models.map((row) => ({ ...row, isAdmin: caller.is_admin })));
  }

  makeForm() {
    const model = field("Model", { name: "model", required: true, placeholder: "Qwen/Qwen3-0.6B, a folder or a .gguf file on the gateway's machine" });
    const name = field("Served as", { name: "served_model_name", placeholder: "its own name" });
    const least = field("Fewest engines", { name: "min_replicas", type: "number", min: 0, max: 4096 });
    const most = field("Most engines", { name: "max_replicas", type: "number", min: 1, max: 4096 });
    const form = el("form", { class: "fields", id: "load" }, model, name, least, most, el("button", { type: "submit" }, "Load"));
    this.own = new ModelSettings();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.load(form);
    });
    return el("div", {}, form, this.own.element);
  }

  async load(form) {
    try {
      const own = this.own.given();
      const card = await call("POST", "/admin/models", { ...given(form), ...(Object.keys(own).length ? { settings: own } : {}) });
      setText(this.notice, `${card.id} is loading`);
      form.reset();
      this.own.reset();
    } catch (error) {
      setText(this.notice, error.message);
    }
  }
}

function bounds(row) {
  // Without administrator rights only whether there is any is shown.
  if (row.replicas === null) return "there";
  if (row.max_replicas === undefined) return `${row.replicas}`;
  const wanted = row.min_replicas === row.max_replicas ? `${row.max_replicas}` : `${row.min_replicas} to ${row.max_replicas}`;
  return `${row.replicas} of ${wanted}${row.starting ? `, ${row.starting} starting` : ""}`;
}

// Where a model stands that takes turns on its device, with its bytes there and since when it computes nothing.
function turnOf({ turn, is_pinned, wait_seconds, num_bytes, unused_seconds }) {
  if (!turn) return "–";
  const state = is_pinned ? `${turn}, pinned` : turn;
  const wait = wait_seconds ? `, awake in ${wait_seconds.toFixed(1)} s` : "";
  const unused = unused_seconds < 0 ? "" : `, unused ${Math.round(unused_seconds)} s`;
  return `${state}${wait}, ${(num_bytes / 1e9).toFixed(2)} GB${unused}`;
}

function progressOf({ progress, problem }) {
  if (problem) return problem;
  return progress ? `${progress.what} ${progress.total ? percent(progress.done, progress.total) : ""}` : "";
}

function modelTable(say) {
  return new LiveTable(
    "Models",
    (row) => row.id,
    [
      { title: "model", text: (row) => row.id, head: true },
      { title: "state", make: () => badge("", ""), update: (node, row) => setBadge(node, row.state, LEVELS[row.state] ?? "soft") },
      { title: "engines", text: bounds },
      { title: "turn", text: turnOf },
      { title: "requests", text: (row) => count(row.num_requests), numeric: true },
      { title: "longest", text: (row) => (row.max_model_len ? `${count(row.max_model_len)} tokens` : "–"), numeric: true },
      {
        title: "progress",
        make: () => el("div", { class: "with-bar" }, el("span"), bar("bar-used")),
        update: (node, row) => {
          setText(node.children[0], progressOf(row));
          node.children[1].classList.toggle("gone", !row.progress);
          drawBar(node.children[1], row.progress?.total ?? 0, row.progress?.done ?? 0);
        },
      },
      { title: "", make: (row) => actions(row, say), update: showActions },
    ],
    "No model is served yet.",
  );
}

function actions({ id }, say) {
  const button = (text, act) => smallButton(text, `${text} ${id}`, act);
  const turn = (text) => button(text, () => attempt(() => call("POST", `${path(id)}/${text.toLowerCase()}`), `${id}: ${text.toLowerCase()}`, say));
  const turns = el("span", { class: "row-actions" }, turn("Sleep"), turn("Wake"), turn("Pin"), turn("Unpin"));
  return el("div", { class: "row-actions" }, turns, button("Scale", () => askScale(id, say)), button("Unload", () => askUnload(id, say)));
}

function showActions(node, row) {
  node.hidden = !(row.isAdmin && row.is_supervised);
  const [turns] = node.children;
  turns.hidden = !row.turn;
  const [sleep, wake, pin, unpin] = turns.children;
  const isAwake = row.turn === "awake";
  sleep.hidden = !isAwake;
  wake.hidden = isAwake;
  pin.hidden = row.is_pinned;
  unpin.hidden = !row.is_pinned;
}

function askScale(id, say) {
  askForm(
    `Engines of ${id}`,
    "Scale",
    async (bounds) => {
      await call("PATCH", path(id), bounds);
      say(`${id} is scaled`);
    },
    field("Fewest engines", { name: "min_replicas", type: "number", min: 0, max: 4096, required: true, value: 1 }),
    field("Most engines", { name: "max_replicas", type: "number", min: 1, max: 4096, required: true, value: 1 }),
  );
}

async function askUnload(id, say) {
  const text = `New requests for ${id} are refused, those that run end, then its processes stop.`;
  if (await confirmed(`Unload ${id}?`, text, "Unload")) await attempt(() => call("DELETE", path(id)), `${id} is unloading`, say);
}

async function attempt(work, done, say) {
  try {
    await work();
    say(done);
  } catch (error) {
    say(error.message);
  }
}
