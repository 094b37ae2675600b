// Small drawings: sparklines, and bars of parts. Decoration beside figures in text, so hidden from screen readers.
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 28;

function svg(tag, attributes) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

export function sparkline() {
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(svg("path", { class: "spark-area" }), svg("path", { class: "spark-line" }));
  return drawn;
}

export function drawSparkline(drawn, values, slots = 60) {
  const [area, line] = drawn.children;
  const most = Math.max(...values, 1e-9);
  const step = WIDTH / (slots - 1);
  const first = WIDTH - (values.length - 1) * step;
  const points = values.map((value, i) => `${(first + i * step).toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1)}`);
  line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  area.setAttribute("d", points.length > 1 ? `M${first.toFixed(1)},${HEIGHT}L${points.join("L")}L${WIDTH},${HEIGHT}Z` : "");
}

// A bar of parts of a whole; `classes` name the parts.
export function bar(...classes) {
  const drawn = svg("svg", { viewBox: "0 0 100 8", class: "bar", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(svg("rect", { width: 100, height: 8, class: "bar-rest" }));
  for (const each of classes) drawn.append(svg("rect", { height: 8, width: 0, class: each }));
  return drawn;
}

export function drawBar(drawn, whole, ...parts) {
  let x = 0;
  parts.forEach((part, i) => {
    const width = whole ? Math.min(100 - x, (100 * Math.max(0, part)) / whole) : 0;
    drawn.children[i + 1].setAttribute("x", x.toFixed(2));
    drawn.children[i + 1].setAttribute("width", width.toFixed(2));
    x += width;
  });
}
