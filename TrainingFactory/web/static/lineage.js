// Lineage as an SVG drawing: from the base model through runs and data to a version.
import { h, svg } from "./dom.js";
import { pairs } from "./parts.js";

const WIDTH = 200;
const HEIGHT = 70;
const GAP = 44;
const SMALLEST = 0.75; // smallest scale; a wider drawing is scrolled
const LONGEST = 29; // characters in a line

/** Draws nodes [{name, what, rows?}] from left to right; a drawing that is too wide is scrolled. */
export function chain(nodes) {
  const width = nodes.length * (WIDTH + GAP) - GAP + 4;
  const named = "Lineage: " + nodes.map(({ name, what }) => name + ", " + what).join("; then ");
  const drawing = svg("svg", {
    class: "lineage",
    width,
    height: HEIGHT + 4,
    viewBox: `0 0 ${width} ${HEIGHT + 4}`,
    role: "img",
    "aria-label": named,
    style: { "min-width": width * SMALLEST + "px" },
  });
  nodes.forEach((node, at) => {
    const x = 2 + at * (WIDTH + GAP);
    if (at) drawing.append(arrow(x - GAP, x));
    drawing.append(box(node, x, at === nodes.length - 1));
  });
  const told = nodes.filter(({ rows }) => rows?.length);
  const details =
    told.length > 0 &&
    h(
      "div",
      { class: "nodes" },
      told.map(({ name, what, rows }) =>
        h(
          "section",
          {},
          h("h3", {}, name, " ", h("small", {}, what)),
          pairs(rows.map(([key, value]) => [key, String(value)])),
        ),
      ),
    );
  return h(
    "div",
    {},
    h("div", { class: "lineage-scroll", tabindex: "0", role: "region", "aria-label": "Lineage" }, drawing),
    details,
  );
}

function arrow(from, to) {
  const y = 2 + HEIGHT / 2;
  return svg("path", {
    class: "arrow",
    d: `M${from + 5} ${y} H${to - 6} M${to - 11} ${y - 4} L${to - 6} ${y} L${to - 11} ${y + 4}`,
  });
}

function box({ name, what }, x, last) {
  return svg(
    "g",
    { class: "node" + (last ? " last" : "") },
    svg("title", {}, name + ": " + what),
    svg("rect", { x, y: 2, width: WIDTH, height: HEIGHT, rx: 7 }),
    svg("text", { class: "name", x: x + 12, y: 24 }, short(name)),
    lines(what).map((line, at) => svg("text", { class: "what", x: x + 12, y: 42 + at * 15 }, line)),
  );
}

/** Breaks a text into two lines between words. */
function lines(text) {
  if (text.length <= LONGEST) return [text];
  const at = text.lastIndexOf(" ", LONGEST);
  return at < 1 ? [short(text)] : [text.slice(0, at), short(text.slice(at + 1))];
}

function short(text) {
  return text.length > LONGEST ? text.slice(0, LONGEST - 1) + "…" : text;
}
