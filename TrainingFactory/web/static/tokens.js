// Tokens coloured by advantage, log-prob, or the log-prob difference of learner and sampler. Trained tokens (the loss mask) are underlined.
import { h, visible } from "./dom.js";
import { number, signed } from "./format.js";

const SURPRISING = 4; // a log-prob of -4 or less has the strongest colour
const APART = 0.02; // a difference that bfloat16 alone can cause: smaller ones get weaker colours

/** The pieces of a turn, each with its numbers in a tooltip. */
export function tokens(pieces, way, credit) {
  return h(
    "pre",
    { class: "tokens" },
    pieces.map((piece) => token(piece, way, credit)),
  );
}

function token(piece, way, { measure, largest, furthest }) {
  const value = mean(piece.values);
  const off = gap(piece);
  const [kind, strength] =
    way === "advantage"
      ? signedColour(value, largest, 0.1)
      : way === "difference"
        ? signedColour(off, Math.max(furthest, APART), 0)
        : ["rare", Math.min(1, -(mean(piece.logprobs) ?? 0) / SURPRISING) * 0.48];
  const told = [
    `token ${piece.ids.join(", ")}`,
    `log-prob ${piece.logprobs.map((each) => number(each)).join(", ")}`,
    off !== null && `learner's log-prob ${piece.learned.map((each) => number(each)).join(", ")}, difference ${signed(off)}`,
    piece.trained ? `${measure} ${signed(value)}` : "not trained",
  ].filter(Boolean);
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

function signedColour(value, largest, least) {
  const share = largest && Math.abs(value ?? 0) / largest;
  return [value < 0 ? "minus" : "plus", share && least + share * (0.48 - least)];
}

/** The learner's log-prob less the sampler's; null where it is not known. */
function gap({ learned, logprobs }) {
  return learned.length ? mean(learned) - mean(logprobs) : null;
}

/** Notes with every member how far the learner is from the sampler at most, and returns it; null: it is not known. */
export function spread(group) {
  const credits = group.members.map((member) => member.credit).filter(Boolean);
  const gaps = credits.flatMap(({ turns }) => turns.flatMap(({ pieces }) => pieces.map(gap)));
  const known = gaps.filter((each) => each !== null).map(Math.abs);
  const furthest = known.length ? Math.max(...known) : null;
  for (const credit of credits) Object.assign(credit, { furthest, typical: mean(known) });
  return furthest;
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
      "No token credit is available: the text is shown without colours.",
    );
  const mask = [
    h("span", { class: "token trained" }, "trained"),
    h("span", { class: "token untrained" }, "sampled, not trained"),
    h("span", { class: "soft" }, "prompts and tool results are never trained"),
  ];
  const both = (largest, what) => [
    signed(-largest),
    h("i", { class: "scale diverging", "aria-hidden": "true" }),
    signed(largest),
    h("span", { class: "soft" }, what),
  ];
  const off = `learner's log-prob minus the sampler's, with the same weights: mean ${number(credit.typical)}, maximum ${number(credit.furthest)}`;
  const scale =
    way === "advantage"
      ? both(credit.largest, credit.measure)
      : way === "difference"
        ? both(Math.max(credit.furthest, APART), off)
        : [
            "likely",
            h("i", { class: "scale rare", "aria-hidden": "true" }),
            "log-prob of −" + SURPRISING + " or less",
            h("span", { class: "soft" }, "of the sampler"),
          ];
  return h(
    "div",
    { class: "token-legend", role: "note", "aria-label": "Legend of the colours" },
    h("span", {}, scale),
    h("span", {}, mask),
    way === "advantage" && credit.note && h("span", { class: "soft" }, credit.note),
  );
}
