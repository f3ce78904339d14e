// Small drawings for tables: sparklines, and success rates with their intervals.
import { svg } from "./dom.js";
import { number, percent } from "./format.js";

/** Draws a curve without axes; its end is marked. */
export function spark(values, label, width = 96, height = 22) {
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  if (!known.length) return svg("svg", { class: "spark", width, height, "aria-hidden": "true" });
  const low = Math.min(...known);
  const span = Math.max(...known) - low;
  const x = (at) => 2 + (known.length > 1 ? at / (known.length - 1) : 1) * (width - 6);
  const y = (value) => height - 3 - (span ? (value - low) / span : 0.5) * (height - 6); // flat: in the middle
  const points = known.map((value, at) => x(at).toFixed(1) + "," + y(value).toFixed(1));
  const area = `2,${height} ${points.join(" ")} ${x(known.length - 1).toFixed(1)},${height}`;
  const named = label + " from " + number(known[0]) + " to " + number(known.at(-1));
  return svg(
    "svg",
    { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": named },
    points.length > 1 && [svg("polygon", { points: area }), svg("polyline", { points: points.join(" ") })],
    svg("circle", { cx: x(known.length - 1), cy: y(known.at(-1)), r: 2 }),
  );
}

/** Draws a share between 0 and 1 with its interval. */
export function interval({ value, low, high }, width = 72, height = 14) {
  const x = (share) => 3 + Math.max(0, Math.min(1, share)) * (width - 6);
  const middle = height / 2;
  const named = `${percent(value)}, between ${percent(low)} and ${percent(high)}`;
  return svg(
    "svg",
    { class: "interval", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": named },
    svg("title", {}, named),
    svg("line", { class: "track", x1: 3, x2: width - 3, y1: middle, y2: middle }),
    svg("line", { class: "span", x1: x(low ?? value), x2: x(high ?? value), y1: middle, y2: middle }),
    svg("circle", { cx: x(value), cy: middle, r: 3 }),
  );
}

/** Draws a number left or right of zero as a bar; `largest` is the longest. */
export function barOf(value, largest, width = 88, height = 12) {
  const middle = width / 2;
  const length = largest ? (Math.abs(value) / largest) * (middle - 1) : 0;
  const x = value < 0 ? middle - length : middle;
  return svg(
    "svg",
    { class: "bar-of", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("line", { x1: middle, x2: middle, y1: 0, y2: height }),
    svg("rect", { class: value < 0 ? "minus" : "plus", x, y: 2, width: length, height: height - 4, rx: 1.5 }),
  );
}
