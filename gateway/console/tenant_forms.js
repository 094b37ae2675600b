// What an administrator does with tenants: adding, changing, keys, removing.
import { askForm, choice, confirmed, el, field, openDialog, setText, smallButton } from "./dom.js";
import { call } from "./session.js";
import { LiveTable } from "./table.js";

export const LIMITS = {
  requests_per_minute: ["requests/min", "Requests a minute"],
  tokens_per_minute: ["tokens/min", "Tokens a minute"],
  concurrency: ["at once", "Answers at once"],
  budget: ["tokens", "Budget, in tokens"],
};
const path = (id) => `/admin/tenants/${encodeURIComponent(id)}`;

const limitFields = (limits) => [
  ...Object.entries(LIMITS).map(([name, [, label]]) => field(label, { name, type: "number", min: 0, step: 1, placeholder: "no limit", value: limits[name] })),
  choice("Period of the budget", { name: "budget_period" }, [["month", "month"], ["day", "day"]]),
];

const shareFields = ({ weight, tier }) => [
  field("Weight among tenants", { name: "weight", type: "number", min: 0.001, max: 1000, step: "any", required: true, value: weight }),
  field("Tier; lower goes first", { name: "tier", type: "number", min: 0, max: 100, step: 1, required: true, value: tier }),
];

// Fields of a form as the API takes them: limits apart; one that is empty is null, which lifts it.
function asked({ weight, tier, id, budget_period: period, ...limits }) {
  const all = Object.fromEntries(Object.keys(LIMITS).map((name) => [name, limits[name] ?? null]));
  return { ...(id === undefined ? {} : { id }), weight, tier, limits: { ...all, budget_period: period } };
}

export function addTenant(say) {
  askForm(
    "Add a tenant",
    "Add",
    async (fields) => {
      const { key, id } = await call("POST", "/admin/tenants", asked(fields));
      say(`the tenant ${id} is there`);
      showKey(id, key);
    },
    field("Name", { name: "id", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}", title: "letters, digits, . _ -; up to 64", autocomplete: "off" }),
    ...shareFields({ weight: 1, tier: 0 }),
    ...limitFields({}),
  );
}

export function changeTenant(row, say) {
  const dialog = askForm(
    `Shares and limits of ${row.id}`,
    "Change",
    async (fields) => {
      await call("PATCH", path(row.id), asked(fields));
      say(`${row.id} is changed`);
    },
    ...shareFields(row),
    ...limitFields(row.limits),
  );
  dialog.querySelector("select").value = row.limits.budget_period ?? "month";
}

// A key as the one answer has it that made it.
function showKey(id, key) {
  const copy = el("button", { type: "button", onclick: () => navigator.clipboard.writeText(key) }, "Copy");
  const body = el("div", {}, el("p", {}, "This is the only time that it is shown: the deployment keeps a digest of it."), el("pre", { class: "secret", tabindex: "0" }, key));
  openDialog(`Key of ${id}`, body, ...(navigator.clipboard ? [copy] : []));
}

export async function showKeys(id) {
  const notice = el("p", { role: "status", class: "notice" });
  const attempt = async (work) => {
    try {
      table.update((await work()).keys);
      setText(notice, "");
    } catch (error) {
      setText(notice, error.message);
    }
  };
  const table = new LiveTable(
    `Keys of ${id}`,
    (key) => key.id,
    [
      { title: "key", text: (key) => `hw-${key.id}-…`, head: true },
      { title: "made", text: (key) => when(key.created_at) },
      { title: "ends", text: (key) => (key.expires_at ? when(key.expires_at) : "never") },
      {
        title: "",
        make: (key) =>
          smallButton("Remove", `Remove the key ${key.id}`, async () => {
            if (await confirmed("Remove the key?", "Requests with it are refused from now on.", "Remove")) await attempt(() => call("DELETE", `${path(id)}/keys/${key.id}`));
          }),
      },
    ],
    "The tenant has no key: it cannot ask.",
  );
  const add = async (body) => {
    await attempt(async () => {
      const reported = await call("POST", `${path(id)}/keys`, body);
      showKey(id, reported.key);
      return reported;
    });
  };
  const buttons = [
    el("button", { type: "button", onclick: () => add({}) }, "Add a key"),
    el("button", { type: "button", class: "quiet", onclick: () => add({ expire_others_after: 86_400 }) }, "Replace: the others end in a day"),
  ];
  openDialog(`Keys of ${id}`, el("div", {}, table.element, notice), ...buttons);
  await attempt(() => call("GET", path(id)));
}

export async function removeTenant(id, say) {
  const text = "Its keys are refused from now on. Its files, batches, responses and adapters are deleted.";
  if (!(await confirmed(`Remove the tenant ${id}?`, text, "Remove"))) return;
  try {
    await call("DELETE", path(id));
    say(`the tenant ${id} is removed`);
  } catch (error) {
    say(error.message);
  }
}

const when = (at) => new Date(at * 1000).toLocaleString("en-GB");
