// The OpenAPI description for people: each path with what it does, and the fields of its body.
import { el, find } from "./dom.js";
import { refusal, root } from "./session.js";

// The schema that a reference names; any other is itself.
function resolved(schema, schemas) {
  const name = schema?.$ref?.split("/").at(-1);
  return name ? schemas[name] : schema;
}

function typeOf(schema, schemas) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map((each) => typeOf(each, schemas)))].join(" or ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items, schemas) : "any"}`;
  return [schema.type ?? "any"].flat().join(" or ");
}

function fields(schema, schemas) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, el("code", {}, name)),
      el("td", {}, typeOf(field, schemas)),
      el("td", {}, required.has(name) ? "required" : field.default === undefined ? "" : JSON.stringify(field.default)),
    ),
  );
  const heads = ["field", "type", "default"].map((each) => el("th", { scope: "col" }, each));
  return el("div", { class: "scroll", tabindex: "0" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)));
}

function operation(path, method, reported, schemas) {
  const content = Object.values(reported.requestBody?.content ?? {})[0];
  const body = content && resolved(content.schema, schemas);
  const title = [el("span", { class: "badge good" }, method.toUpperCase()), " ", el("code", {}, path), ` ${reported.summary ?? ""}`];
  if (!body?.properties) return el("p", { class: "operation" }, ...title);
  return el("details", { class: "operation" }, el("summary", {}, ...title), fields(body, schemas));
}

async function show() {
  const response = await fetch(`${root}/openapi.json`);
  if (!response.ok) throw await refusal(response);
  const { paths, components, info } = await response.json();
  const shown = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, reported]) => operation(path, method, reported, components.schemas)),
  );
  find("paths").replaceChildren(el("p", { class: "note" }, `Version ${info.version}. Keys go into the header “authorization: Bearer KEY”.`), ...shown);
}

show().catch((error) => find("paths").replaceChildren(el("p", { class: "failed" }, error.message)));
