// A model's text as nodes: the usual Markdown, and nothing else. Markup in the text stays text; links go to http and https.
import { el } from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*([\w+#-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,4}[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s][^*]*?)\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s)]{1,2000})\)/;

// Nodes of a text. Lines of one paragraph keep their breaks.
export function markdown(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const nodes = [];
  let i = 0;
  const run = (fits) => {
    const first = i;
    while (i < lines.length && fits(lines[i])) i += 1;
    return lines.slice(first, i);
  };
  while (i < lines.length) {
    const line = lines[i];
    const [fence, heading] = [line.match(FENCE), line.match(HEADING)];
    if (!line.trim()) i += 1;
    else if (fence) {
      i += 1;
      const code = run((each) => !each.trim().startsWith(fence[1]));
      i += 1;
      nodes.push(el("pre", { tabindex: "0" }, el("code", {}, code.join("\n"))));
    } else if (heading) {
      i += 1;
      // The page has headings of its own above these.
      nodes.push(el(`h${Math.min(6, heading[1].length + 3)}`, {}, ...inline(heading[2])));
    } else if (QUOTE.test(line)) {
      nodes.push(el("blockquote", {}, ...blocks(run((each) => QUOTE.test(each)).map((each) => each.match(QUOTE)[1]))));
    } else if (ITEM.test(line)) {
      nodes.push(list(run((each) => each.trim() && (ITEM.test(each) || /^\s+\S/.test(each)))));
    } else {
      const paragraph = run((each) => each.trim() && !FENCE.test(each) && !HEADING.test(each) && !ITEM.test(each) && !QUOTE.test(each));
      nodes.push(el("p", {}, ...inline(paragraph.join("\n"))));
    }
  }
  return nodes;
}

function list(lines) {
  const [, indent, mark] = lines[0].match(ITEM);
  const items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S/), indent.length + 2)));
  }
  const isOrdered = /\d/.test(mark);
  const start = isOrdered ? Number.parseInt(mark, 10) : null;
  return el(isOrdered ? "ol" : "ul", { start: start === 1 ? null : start }, ...items.map(itemNode));
}

function itemNode([first, ...rest]) {
  return el("li", {}, ...inline(first), ...blocks(rest));
}

function inline(text) {
  const nodes = [];
  let rest = text;
  for (let match = rest.match(INLINE); match; match = rest.match(INLINE)) {
    const [whole, , code, bold, alsoBold, soft, label, address] = match;
    nodes.push(rest.slice(0, match.index));
    if (code !== undefined) nodes.push(el("code", {}, code));
    else if (bold ?? alsoBold) nodes.push(el("strong", {}, ...inline(bold ?? alsoBold)));
    else if (soft !== undefined) nodes.push(el("em", {}, ...inline(soft)));
    else nodes.push(el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label));
    rest = rest.slice(match.index + whole.length);
  }
  return [...nodes, rest].filter((node) => node !== "");
}
