// Live: what the cluster does now, in figures, replicas, requests and prefixes.
import { drawSparkline, sparkline } from "./drawing.js";
import { el, section, setText, syncNodes } from "./dom.js";
import { EngineTable } from "./engine_table.js";
import { count, percent, rate, seconds } from "./format.js";
import { PastHours } from "./past_hours.js";
import { PrefixTrees } from "./prefix_trees.js";
import { RequestFilter } from "./request_filter.js";
import { RequestTable } from "./request_table.js";
import { LEVELS, LiveTable, badge, setBadge } from "./table.js";

const TILES = [
  {
    id: "tokens",
    title: "tokens/s",
    value: (s, h) => h.rate("total/output", h.growth("all/output", s.gateways, (each) => each.output_tokens), s.at),
    show: rate,
  },
  { id: "running", title: "requests running", value: (s) => s.totals.num_running, show: count },
  { id: "waiting", title: "waiting for a turn", value: (s) => s.totals.num_waiting, show: count },
  {
    id: "hits",
    title: "prompt tokens cached",
    value: (s, h) =>
      h.share(
        "total/hits",
        h.growth("all/cached", s.gateways, (each) => each.cached_tokens),
        h.growth("all/prompt", s.gateways, (each) => each.prompt_tokens),
      ),
    show: (value) => percent(value, value === null ? 0 : 1),
  },
  { id: "lag", title: "index lag, p99", value: (s) => s.event_lag ?? null, show: seconds, admin: true },
];

export class LiveView {
  constructor() {
    this.title = "Live";
    this.tiles = el("ul", { class: "tiles" });
    this.events = el("ol");
    const log = el("div", { class: "events", role: "log", "aria-label": "Engines that came and went", tabindex: "0" }, this.events);
    this.hours = new PastHours();
    this.filter = new RequestFilter(() => this.showRequests());
    this.replicas = new EngineTable();
    this.stages = stageTable();
    this.requests = new RequestTable("Requests that wait or run", "Nothing waits or runs.");
    this.recent = new RequestTable("Requests that have ended", "None has ended yet.");
    this.prefixes = new PrefixTrees();
    this.cluster = el(
      "div",
      {},
      section("Engines", "", this.replicas.element, log),
      section("In front of them", "", this.stages.element),
      section(
        "Hottest prefixes",
        "Blocks that the prompts sent last share, through whichever gateway, by hash: a tree of how they go on, and which engines hold them.",
        this.prefixes.element,
      ),
    );
    this.element = el(
      "div",
      {},
      this.tiles,
      this.hours.element,
      this.filter.element,
      section("Requests now", "", this.requests.element),
      this.cluster,
      section("Ended last", "", this.recent.element),
    );
    this.known = null;
  }

  update(snapshot, history) {
    const isAdmin = snapshot.caller.is_admin;
    const tiles = TILES.filter(({ admin }) => isAdmin || !admin).map((tile) => ({ ...tile, now: tile.value(snapshot, history) }));
    syncNodes(this.tiles, tiles, (tile) => tile.id, makeTile, (node, tile) => updateTile(node, tile, history));
    this.shown = snapshot;
    this.filter.update([...snapshot.requests, ...snapshot.recent], isAdmin);
    this.showRequests();
    this.hours.update(isAdmin);
    this.cluster.hidden = !isAdmin;
    if (!isAdmin) return;
    this.replicas.update(snapshot.replicas);
    this.stages.update(snapshot.stages.map((row) => ({ ...row, ...toldBy(row, snapshot) })));
    this.prefixes.update(snapshot.prefixes);
    this.report(snapshot.replicas);
  }

  showRequests() {
    if (!this.shown) return;
    this.requests.update(this.shown.requests.filter((row) => this.filter.fits(row)));
    this.recent.update(this.shown.recent.filter((row) => this.filter.fits(row)));
  }

  // Who came and who left since the last snapshot.
  report(replicas) {
    const now = new Map(replicas.map(({ id, epoch }) => [`${id} ${epoch}`, id]));
    if (this.known) {
      for (const [life, id] of this.known) if (!now.has(life)) this.note(`${id} has left`);
      for (const [life, id] of now) if (!this.known.has(life)) this.note(`${id} has come`);
    }
    this.known = now;
  }

  note(text) {
    const at = new Date().toLocaleTimeString("en-GB");
    this.events.prepend(el("li", {}, el("time", {}, at), ` ${text}`));
    while (this.events.children.length > 20) this.events.lastChild.remove();
  }
}

function makeTile({ title }) {
  return el("li", { class: "tile" }, el("strong"), el("span", {}, title), sparkline());
}

function updateTile(node, { id, now, show }, history) {
  setText(node.children[0], now === null ? "–" : show(now));
  drawSparkline(node.children[2], history.past(`tile/${id}`, now));
}

const countOf = (value) => (value === null || value === undefined ? "" : count(value));

const word = (kind) => kind.replace("_", " ");

// What a gateway has reported of its requests and its index; nothing waits in the other stages.
function toldBy({ kind, id }, { gateways, event_lags: lags }) {
  const totals = gateways.find((each) => each.id === id)?.totals;
  return kind === "gateway" && totals ? { num_running: totals.num_running, num_waiting: totals.num_waiting, lag: lags[id] } : {};
}

function stageTable() {
  return new LiveTable(
    "Stages in front of the engines",
    (row) => `${row.kind} ${row.id} ${row.address}`,
    [
      { title: "stage", text: (row) => word(row.kind), head: true },
      { title: "name", text: (row) => row.id },
      { title: "running", text: (row) => countOf(row.num_running), numeric: true },
      { title: "waiting", text: (row) => countOf(row.num_waiting), numeric: true },
      { title: "index lag, p99", text: (row) => (row.lag === undefined ? "" : seconds(row.lag)), numeric: true },
      { title: "address", text: (row) => [row.rest_url, row.address].filter(Boolean).join(" ") },
      {
        title: "state",
        make: (row) => badge(row.state, ""),
        update: (node, row) => {
          const missed = row.without.length ? `without ${row.without.join(", ")}` : "";
          setBadge(node, missed || row.state, missed ? "bad" : LEVELS[row.state]);
        },
      },
    ],
    "Nothing is there.",
  );
}
