// The hottest prefixes of each model as nested lists.
import { el, setText, syncNodes } from "./dom.js";
import { count, plural } from "./format.js";

export class PrefixTrees {
  constructor() {
    this.list = el("div");
    this.empty = el("p", { class: "empty" }, "No two prompts sent lately share a block.");
    this.element = el("div", {}, this.list, this.empty);
  }

  update(trees) {
    const hot = trees.filter(({ nodes }) => nodes.length);
    this.empty.hidden = hot.length > 0;
    syncNodes(this.list, hot, ({ model }) => model, makeTree, updateTree);
  }
}

function makeTree({ model }) {
  return el("div", {}, el("h3", {}, model), el("ul", { class: "tree" }));
}

function updateTree(node, { nodes, block_size: size }) {
  updateNodes(node.lastElementChild, nodes, size);
}

function updateNodes(list, nodes, size) {
  syncNodes(list, nodes, ({ hash }) => hash, makeNode, (item, node) => {
    const [label, children] = item.children;
    setText(label.children[0], node.hash);
    const held = node.holders.length ? `held by ${node.holders.join(", ")}` : "held by none";
    setText(label.children[1], `${plural(node.num_requests, "request")} · ${count(node.num_blocks * size)} tokens · ${held}`);
    updateNodes(children, node.children, size);
  });
}

const makeNode = () => el("li", {}, el("div", {}, el("code"), el("span")), el("ul"));
