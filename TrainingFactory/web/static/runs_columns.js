// The columns of the table of runs: which there are, which are shown, and how a cell is drawn.
import { h } from "./dom.js";
import { interval, spark } from "./figures.js";
import { ago, counted, duration, measured, moment, number, percent, plain } from "./format.js";
import { button, dialog, progress, stateBadge } from "./parts.js";

export const STATES = ["running", "finished", "interrupted", "failed", "killed", "unreadable"];
const OPTION = "option:"; // prefix of the columns of config options

const curve = (row) => {
  const loss = row.spark_of === "loss";
  return h(
    "span",
    { class: "curve" },
    spark(row.spark, row.spark_of),
    h("span", { class: "num" }, number(loss ? row.loss : row.reward, 3)),
    loss && row.spark.length > 0 && h("small", {}, "loss"),
  );
};

const heldout = ({ heldout: held }) =>
  held &&
  h(
    "span",
    { class: "curve", title: measured(held) },
    interval(held),
    h("span", { class: "num" }, percent(held.value)),
    held.by !== "training" && h("small", {}, "eval"),
  );

// `of`: the value to sort by and to export; `draw`: the cell, by default the value.
const LISTED = [
  {
    key: "state",
    class: "c-state",
    text: "State",
    of: (row) => row.state,
    rank: (row) => STATES.indexOf(row.state),
    draw: (row) => stateBadge(row.state),
  },
  { key: "algorithm", text: "Algorithm", of: (row) => row.algorithm, class: "c-algorithm" },
  { key: "model", text: "Model", of: (row) => row.model, class: "c-model" },
  { key: "environment", text: "Environment", of: (row) => row.environment ?? "", class: "c-environment" },
  {
    key: "progress",
    text: "Progress",
    of: (row) => row.step,
    rank: (row) => (row.steps ? row.step / row.steps : 0),
    draw: (row) => row.state !== "unreadable" && progress(row.step, row.steps),
    class: "c-progress",
  },
  {
    key: "reward",
    text: "Reward or loss",
    of: (row) => (row.spark_of === "loss" ? row.loss : row.reward),
    rank: (row) => row.reward,
    draw: curve,
    class: "c-curve",
  },
  {
    key: "heldout",
    text: "Held-out success",
    of: (row) => row.heldout?.value,
    draw: heldout,
    class: "c-heldout",
  },
  {
    key: "speed",
    text: "Tokens/s",
    of: (row) => row.tokens_per_second,
    draw: (row) => row.tokens_per_second && number(Math.round(row.tokens_per_second)),
    class: "num c-speed",
  },
  {
    key: "seconds",
    text: "Time",
    of: (row) => row.seconds,
    draw: (row) => row.seconds > 0 && duration(row.seconds),
    class: "num c-time",
  },
  {
    key: "updated",
    text: "Updated",
    of: (row) => row.updated,
    draw: (row) => h("span", { "data-updated": row.updated, title: moment(row.updated) }, ago(row.updated)),
    class: "num c-updated",
  },
];
const MORE = [
  { key: "seed", text: "Seed", of: (row) => row.seed, class: "num" },
  {
    key: "started",
    text: "Started",
    of: (row) => row.started,
    draw: (row) => row.started && moment(row.started),
  },
  { key: "findings", text: "Findings", of: (row) => row.findings, class: "num" },
  { key: "note", text: "Note", of: (row) => row.note, class: "c-note" },
];
const BY_DEFAULT = LISTED.map(({ key }) => key);

/** Returns the columns of config options in which the runs differ. */
function optionColumns(rows) {
  const keys = new Set(rows.flatMap((row) => Object.keys(row.options)));
  const differing = [...keys].filter((key) => new Set(rows.map((row) => plain(row.options[key]))).size > 1);
  return differing.sort().map(optionColumn);
}

function optionColumn(option) {
  const value = (row) => row.options[option];
  const draw = (row) => value(row) !== undefined && h("code", {}, plain(value(row)));
  return {
    key: OPTION + option,
    text: option.split(".").at(-1),
    title: option,
    of: value,
    draw,
    class: "c-option",
  };
}

/** The chosen columns; null: the default, of which the narrow window hides some. */
export function chosenColumns() {
  try {
    const kept = JSON.parse(localStorage.getItem("columns") ?? "null");
    return Array.isArray(kept) ? kept : null;
  } catch {
    return null;
  }
}

/** Returns the columns that are shown, from the keys that were chosen. */
export function columnsOf(chosen) {
  const known = new Map([...LISTED, ...MORE].map((column) => [column.key, column]));
  const find = (key) =>
    known.get(key) ?? (key.startsWith(OPTION) ? optionColumn(key.slice(OPTION.length)) : null);
  return (chosen ?? BY_DEFAULT).map(find).filter(Boolean);
}

/** Asks which columns to show; returns their keys, null for the default, or undefined if nothing changes. */
export async function askColumns(rows) {
  const shown = new Set(chosenColumns() ?? BY_DEFAULT);
  const box = ({ key, text, title }) => {
    const input = h("input", { type: "checkbox", value: key, checked: shown.has(key) });
    return h("label", { class: "tap", title }, input, " ", title ?? text);
  };
  const options = optionColumns(rows);
  const form = h(
    "form",
    { class: "column-choice" },
    [...LISTED, ...MORE].map(box),
    options.length > 0 && h("h3", {}, "Options in which the runs differ"),
    options.map(box),
  );
  const keys = () => [...form.querySelectorAll("input:checked")].map((input) => input.value);
  const answer = await dialog("Columns", form, [
    { text: "Default", value: () => "default" },
    { text: "Show", kind: "main", value: keys },
  ]);
  if (answer === null) return undefined;
  const chosen = answer === "default" ? null : answer;
  if (chosen) localStorage.setItem("columns", JSON.stringify(chosen));
  else localStorage.removeItem("columns");
  return chosen;
}

/** The table for a CSV file: name, tags and note, and the shown columns. */
export function runsCsv(rows, columns) {
  const tags = (row) =>
    Object.entries(row.tags)
      .map(([name, value]) => (value ? name + "=" + value : name))
      .join(" ");
  const heads = ["name", ...columns.map(({ key }) => key.replace(OPTION, "")), "tags", "note"];
  return [heads, ...rows.map((row) => [row.name, ...columns.map(({ of }) => of(row)), tags(row), row.note])];
}

export function tagsOf(row) {
  const tags = Object.entries(row.tags).map(([name, value]) =>
    h("span", { class: "tag" }, value ? name + "=" + value : name),
  );
  return [
    tags,
    row.archived && h("span", { class: "tag" }, "archived"),
    row.findings > 0 && h("span", { class: "tag warn" }, counted(row.findings, "finding")),
  ];
}

export function columnsButton(rows, changed) {
  return button("Columns", async () => {
    const chosen = await askColumns(rows());
    if (chosen !== undefined) changed();
  });
}

/** A choice of the order, for a window without heads of columns. */
export function sortOptions(columns) {
  return [
    ["name", "Sort by name"],
    ...columns.map(({ key, text }) => [key, "Sort by " + text.toLowerCase()]),
  ];
}
