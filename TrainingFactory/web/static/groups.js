// Groups of runs: the same config with other seeds, or another common property; means and standard deviations.
import { h } from "./dom.js";
import { counted, duration, number, percent, plain } from "./format.js";

const SEEDS = /(^|\.)seed$/;
const configOf = (row) => Object.entries(row.options).filter(([key]) => !SEEDS.test(key));

export const GROUPINGS = [
  ["", "No groups"],
  ["config", "Group by config"],
  ["seed", "Group by seed"],
  ["algorithm", "Group by algorithm"],
  ["model", "Group by model"],
  ["environment", "Group by environment"],
];

const KEYS = {
  config: (row) => JSON.stringify([row.model, ...configOf(row).sort()]),
  seed: (row) => String(row.seed ?? "unknown"),
};

/** Mean and sample standard deviation of the known values; the deviation of a single value is null. */
export function statistics(values) {
  const known = values.filter((value) => value !== null && value !== undefined && Number.isFinite(value));
  if (!known.length) return null;
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  const squares = known.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  const deviation = known.length > 1 ? Math.sqrt(squares / (known.length - 1)) : null;
  return { mean, deviation, count: known.length };
}

/** Groups rows by a property; groups are [{key, label, rows}], the largest first. */
export function groupRows(rows, by) {
  const groups = new Map();
  const keyOf = KEYS[by] ?? ((row) => String(row[by] ?? ""));
  for (const row of rows) {
    const key = keyOf(row);
    if (!groups.has(key)) groups.set(key, { key, rows: [] });
    groups.get(key).rows.push(row);
  }
  const made = [...groups.values()];
  const labels =
    by === "config"
      ? configLabels(made)
      : made.map(({ key }) => (by === "seed" ? "seed " + key : key || "none"));
  made.forEach((group, at) => (group.label = labels[at]));
  return made.sort((a, b) => b.rows.length - a.rows.length || a.label.localeCompare(b.label));
}

/** Names configs by algorithm, environment and model, and by the options in which configs that share these differ. */
function configLabels(groups) {
  const base = groups.map(({ rows: [row] }) =>
    [row.algorithm, row.environment, row.model].filter(Boolean).join(" · "),
  );
  return groups.map(({ rows: [row] }, at) => {
    const alike = groups.filter((_, other) => base[other] === base[at]).map((group) => group.rows[0].options);
    const keys = [...new Set(alike.flatMap(Object.keys))].filter((key) => !SEEDS.test(key));
    const differs = keys.filter((key) => new Set(alike.map((each) => plain(each[key]))).size > 1);
    const told = differs.map((key) => key.split(".").at(-1) + "=" + plain(row.options[key] ?? "default"));
    return [base[at] || "unreadable config", told.slice(0, 4).join(", ")].filter(Boolean).join(" · ");
  });
}

/** A mean with its deviation: 0.512 ± 0.03. */
export function spread(found, format = (value) => number(value)) {
  if (!found) return null;
  return h(
    "span",
    { class: "num" },
    format(found.mean),
    found.deviation !== null && h("small", {}, " ± " + format(found.deviation)),
  );
}

export const FIGURES = [
  { key: "reward", text: "Reward", of: (row) => row.reward },
  { key: "loss", text: "Loss", of: (row) => row.loss },
  { key: "heldout", text: "Held-out success", of: (row) => row.heldout?.value, format: percent },
  {
    key: "speed",
    text: "Tokens/s",
    of: (row) => row.tokens_per_second,
    format: (value) => number(Math.round(value)),
  },
  { key: "seconds", text: "Time", of: (row) => row.seconds || null, format: duration },
];

/** The table of groups. `selected` holds names of runs; `toggle(names)` is called with those of a group. */
export function groupTable(groups, selected, toggle) {
  const head = ["", "Group", "Runs", ...FIGURES.map(({ text }) => text)];
  const classes = ["pick", "name", "num", ...FIGURES.map(() => "num")];
  const body = groups.map(({ label, rows }) => {
    const names = rows.map(({ name }) => name);
    const pick = h("input", {
      type: "checkbox",
      "aria-label": "Select " + label,
      onchange: () => toggle(names),
    });
    pick.checked = names.every((name) => selected.has(name));
    const members = rows.map(({ name, seed }) =>
      h("a", { href: "#/run/" + encodeURIComponent(name), title: "seed " + seed }, name),
    );
    return h(
      "tr",
      {},
      h("td", { class: "pick" }, h("label", { class: "tap" }, pick)),
      h("td", { class: "name" }, h("div", {}, label), h("small", { class: "members" }, members)),
      h("td", { class: "num", "data-label": "Runs" }, number(rows.length)),
      FIGURES.map(({ of, text, format }) =>
        h("td", { class: "num", "data-label": text }, spread(statistics(rows.map(of)), format)),
      ),
    );
  });
  return h(
    "table",
    { "aria-label": "Groups of runs" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        head.map((text, at) => h("th", { scope: "col", class: classes[at] }, text)),
      ),
    ),
    h("tbody", {}, body),
  );
}

/** The rows of the table of groups for a CSV file. */
export function groupCsv(groups) {
  const heads = FIGURES.flatMap(({ key }) => [key + "_mean", key + "_deviation", key + "_runs"]);
  const rows = groups.map(({ label, rows: members }) => [
    label,
    members.length,
    members.map(({ name }) => name).join(" "),
    ...FIGURES.flatMap(({ of }) => {
      const found = statistics(members.map(of));
      return [found?.mean, found?.deviation, found?.count];
    }),
  ]);
  return [["group", "runs", "names", ...heads], ...rows];
}

/** Merges the metrics of runs, {steps, times, series}, into one: the mean by step, with its deviation as `NAME±`. */
export function meanData(parts) {
  const steps = [...new Set(parts.flatMap((part) => part.steps))].sort((a, b) => a - b);
  const places = parts.map((part) => new Map(part.steps.map((step, at) => [step, at])));
  const valuesAt = (step, pick) =>
    parts.map((part, n) => (places[n].has(step) ? pick(part)?.[places[n].get(step)] : null));
  const elapsed = parts.map((part) => part.times.map((time) => time - part.times[0]));
  const merged = { steps, times: [], series: {} };
  merged.times = steps.map(
    (step) => statistics(valuesAt(step, (part) => elapsed[parts.indexOf(part)]))?.mean ?? null,
  );
  for (const name of new Set(parts.flatMap((part) => Object.keys(part.series)))) {
    const found = steps.map((step) => statistics(valuesAt(step, (part) => part.series[name])));
    merged.series[name] = found.map((each) => each?.mean ?? null);
    merged.series[name + "±"] = found.map((each) => each?.deviation ?? null);
  }
  return merged;
}

/** The curves to draw for a selection: the mean of each group. */
export function groupEntries(chosen, runs, by) {
  const rows = chosen.map((name) => runs.get(name));
  return groupRows(rows, by).map(({ label, rows: members }) => ({
    label: label + (members.length > 1 ? ` (${members.length} runs)` : ""),
    members: members.map(({ name }) => name),
  }));
}

/** Describes a selection for the bar: 6 runs in 2 groups. */
export function described(count, groups) {
  return counted(count, "run") + " selected" + (groups ? " in " + counted(groups, "group") : "");
}
