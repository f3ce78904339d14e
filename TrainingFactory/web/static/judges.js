// Judges: their agreement with labels, from recorded audits; and labelling of episodes.
import { get, url, where } from "./api.js";
import { h, put, svg, visible } from "./dom.js";
import { counted, moment, number, percent } from "./format.js";
import * as label from "./label.js";
import { command, empty, link, notFound, panel, table, waiting } from "./parts.js";

const SIDE = 190; // pixels of a plot

export async function show(place) {
  const { main, parts, signal } = place;
  const labelling = parts[0] === "label";
  if (parts.length > (labelling ? 1 : 0)) return void put(main, notFound());
  const content = h("div", { class: "view" }, waiting());
  const tab = (path, text, here) => h("a", { href: "#/" + path, "aria-current": here ? "page" : null }, text);
  put(
    main,
    h("header", { class: "head" }, h("h1", {}, "Judges")),
    h(
      "nav",
      { class: "tabs", "aria-label": "Parts of the page" },
      tab("judges", "Agreement", !labelling),
      tab("judges/label", "Label episodes", labelling),
    ),
    content,
  );
  if (labelling) return await label.show(content, place);
  const { audits, left_out: older } = await get(url(["audits"]), signal);
  if (!audits.length) {
    return void put(
      content,
      empty(
        "No judge audits yet",
        link("judges/label", "Label some episodes"),
        ", then audit a judge with your labels in a terminal:",
      ),
      command(
        `tfactory judge audit --gold ${where.replace(" --runs ", "") || "runs"}/labels/RUN.jsonl${where} base_url=URL model=NAME`,
      ),
    );
  }
  const left =
    older > 0 && h("p", { class: "soft note" }, "Older audits in judge-audits.jsonl are not shown here.");
  return void put(content, left, audits.length > 1 && overview(audits), [...audits].reverse().map(auditOf));
}

/** All audits in a table, the newest first. */
function overview(audits) {
  const rows = [...audits]
    .reverse()
    .filter(({ problem }) => !problem)
    .map((each) => [
      visible(each.judge),
      h("code", {}, visible(base(each.gold))),
      moment(each.time),
      number(each.judged),
      percent(each.accuracy),
      number(each.kappa),
      percent(each.injection_moved),
      number(each.length_bias),
    ]);
  return panel(
    "All audits",
    table(
      "Audits",
      [
        "Judge",
        { text: "Labels", class: "spare" },
        { text: "When", class: "spare" },
        { text: "Items", class: "num" },
        { text: "Agreement", class: "num" },
        { text: "Kappa", class: "num" },
        { text: "Injections that worked", class: "num" },
        { text: "Length bias", class: "num" },
      ],
      rows,
    ),
  );
}

function base(path) {
  return String(path ?? "")
    .split("/")
    .at(-1);
}

function auditOf(audit) {
  if (audit.problem) return h("p", { class: "why" }, visible(audit.problem));
  const more = h(
    "small",
    {},
    `${visible(base(audit.gold))} · ${counted(audit.judged, "item")} · ${moment(audit.time)}`,
  );
  const rows = audit.rows.map(([name, value, meaning]) => [
    h("b", { class: "metric" }, name),
    h("span", { class: "num" }, value),
    h("span", { class: "soft" }, meaning),
  ]);
  const shown = panel(
    visible(audit.judge),
    h(
      "div",
      { class: "audit" },
      verdictOf(visible(audit.verdict)),
      table("Metrics of " + audit.judge, ["Metric", { text: "Value", class: "num" }, "Meaning"], rows),
      audit.points?.length > 0 && plot(audit.points),
    ),
    more,
  );
  shown.classList.add("one-audit");
  return shown;
}

/** The verdict as text; its first words are highlighted by how good it is. */
function verdictOf(text) {
  const [head, ...rest] = text.split(": ");
  const kind = /^(Can be trusted|Good enough)/.test(head) ? "good" : /^Not/.test(head) ? "bad" : "warn";
  return h(
    "p",
    { class: "verdict" },
    h("b", { class: kind }, head),
    rest.length > 0 && h("span", {}, rest.join(": ")),
  );
}

/** A plot of the judge's verdicts over the gold labels; on the dashed line both agree. */
function plot(points) {
  const counts = new Map();
  for (const [gold, judge] of points) {
    const key = gold + " " + judge;
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  const most = Math.max(...counts.values());
  const left = 38;
  const top = 14;
  const dots = [...counts].map(([key, count]) => {
    const [gold, judge] = key.split(" ").map(Number);
    return svg("circle", {
      cx: left + gold * SIDE,
      cy: top + (1 - judge) * SIDE,
      r: 3 + 9 * Math.sqrt(count / most),
    });
  });
  const words = [
    svg("text", { x: left, y: top + SIDE + 28, "text-anchor": "middle" }, "0"),
    svg("text", { x: left + SIDE / 2, y: top + SIDE + 28, "text-anchor": "middle" }, "label"),
    svg("text", { x: left + SIDE, y: top + SIDE + 28, "text-anchor": "middle" }, "1"),
    svg("text", { x: left - 18, y: top + SIDE + 4, "text-anchor": "end" }, "0"),
    svg("text", { x: left - 18, y: top + 4, "text-anchor": "end" }, "1"),
    svg(
      "text",
      {
        x: left - 18,
        y: top + SIDE / 2,
        "text-anchor": "middle",
        transform: `rotate(-90 ${left - 18} ${top + SIDE / 2})`,
      },
      "judge",
    ),
  ];
  const named = {
    class: "plot",
    width: SIDE + left + 16,
    height: SIDE + top + 34,
    role: "img",
    "aria-label": `Verdicts of the judge over ${counted(points.length, "label")}`,
  };
  return h(
    "figure",
    {},
    svg(
      "svg",
      named,
      svg("rect", { class: "frame", x: left, y: top, width: SIDE, height: SIDE }),
      svg("line", { class: "ideal", x1: left, y1: top + SIDE, x2: left + SIDE, y2: top }),
      dots,
      words,
    ),
    h(
      "figcaption",
      { class: "soft" },
      "Each dot: a label, the judge's verdict, and how often they occur together. Dots on the line agree.",
    ),
  );
}
