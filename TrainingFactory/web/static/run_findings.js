// The findings of a run with their remedies, and its evaluations.
import { h, put } from "./dom.js";
import { interval } from "./figures.js";
import { moment, number, percent } from "./format.js";
import { icon } from "./icons.js";
import { empty, panel, table } from "./parts.js";

export async function show({ content, view, changed }) {
  const draw = () =>
    put(
      content,
      h(
        "div",
        { class: "columns" },
        panel("Findings", list(view.findings)),
        panel("Evaluations", evaluations(view.evaluations)),
      ),
    );
  draw();
  changed(draw);
}

/** Findings with their remedies, open ones first. */
export function list(findings) {
  if (!findings.length)
    return empty("No findings", "No problems in template, stop token, mask, reward variance and tools.");
  const open = (each) => each.last_step === null || each.last_step === undefined;
  const sorted = [...findings].sort((a, b) => open(b) - open(a));
  return h(
    "ul",
    { class: "findings" },
    sorted.map((each) => one(each, open(each))),
  );
}

function one({ name, sentence, remedy, severity, when }, open) {
  const kind = severity === "ok" || severity === "info" ? "check" : "warning";
  return h(
    "li",
    { class: "finding severity-" + severity + (open ? "" : " gone") },
    icon(kind, 18),
    h(
      "div",
      {},
      h("p", { class: "sentence" }, sentence),
      remedy && h("p", { class: "remedy" }, remedy),
      h("small", {}, [severity, name.replaceAll("_", " "), when].filter(Boolean).join(" · ")),
    ),
  );
}

/** A success rate with its interval, as a drawing and as text. */
export function share(value, low, high) {
  return value === null
    ? "–"
    : h(
        "span",
        { class: "curve" },
        interval({ value, low, high }),
        h("span", { class: "num" }, percent(value)),
      );
}

export function evaluations(rows) {
  if (!rows.length)
    return empty("No evaluations yet", "Set training.eval_every to evaluate on held-out tasks during training.");
  const heads = ["Success", "Tasks", "By", "When"];
  return table(
    "Evaluations",
    heads,
    [...rows].reverse().map(({ step, success, low, high, by, suite, tasks, time }) => {
      const at = step === null ? null : "step " + number(step);
      return [
        share(success, low, high),
        number(tasks),
        [at, by, suite].filter(Boolean).join(", "),
        moment(time),
      ];
    }),
  );
}
