// Tokens coloured by advantage or log-prob. Trained ones are underlined: that is the loss mask.
import { h, visible } from "./dom.js";
import { number, signed } from "./format.js";

const SURPRISING = 4; // a log-prob of -4 or less has the strongest colour

/** The pieces of a turn, each with its numbers for the mouse. */
export function tokens(pieces, way, credit) {
  return h(
    "pre",
    { class: "tokens" },
    pieces.map((piece) => token(piece, way, credit)),
  );
}

function token(piece, way, { measure, largest }) {
  const value = mean(piece.values);
  const chance = mean(piece.logprobs);
  const share = largest && Math.abs(value ?? 0) / largest;
  const [kind, strength] =
    way === "advantage"
      ? [value < 0 ? "minus" : "plus", share && 0.1 + share * 0.38]
      : ["rare", Math.min(1, -(chance ?? 0) / SURPRISING) * 0.48];
  const told = [
    `token ${piece.ids.join(", ")}`,
    `log-prob ${piece.logprobs.map((each) => number(each)).join(", ")}`,
    piece.trained ? `${measure} ${signed(value)}` : "not trained",
  ];
  return h(
    "span",
    {
      class: "token " + kind + (piece.trained ? " trained" : " untrained"),
      title: told.join("\n"),
      style: { "--a": strength.toFixed(3) },
    },
    shown(piece.text),
  );
}

function mean(values) {
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
}

/** A line's end is a token too, so it is drawn. */
function shown(text) {
  return visible(text).replaceAll("\n", "↵\n") || "∅";
}

/** What the colours mean. */
export function legend(way, credit) {
  if (!credit)
    return h(
      "p",
      { class: "legend-note" },
      "There is no credit of these tokens: their text is shown as it is.",
    );
  const mask = [
    h("span", { class: "token trained" }, "trained"),
    h("span", { class: "token untrained" }, "sampled, not trained"),
    h("span", { class: "soft" }, "prompts and results of tools are never trained"),
  ];
  const largest = credit.largest;
  const scale =
    way === "advantage"
      ? [
          signed(-largest),
          h("i", { class: "scale diverging", "aria-hidden": "true" }),
          signed(largest),
          h("span", { class: "soft" }, credit.measure),
        ]
      : [
          "likely",
          h("i", { class: "scale rare", "aria-hidden": "true" }),
          "log-prob of −" + SURPRISING + " or less",
          h("span", { class: "soft" }, "as the sampler had it"),
        ];
  return h(
    "div",
    { class: "token-legend", role: "note", "aria-label": "What the colours mean" },
    h("span", {}, scale),
    h("span", {}, mask),
    way === "advantage" && credit.note && h("span", { class: "soft" }, credit.note),
  );
}
