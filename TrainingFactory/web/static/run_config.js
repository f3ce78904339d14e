// The config of a run: changed options, all options, YAML, or the differences from another run.
import { get, url, where } from "./api.js";
import { h, put, visible } from "./dom.js";
import { counted, plain } from "./format.js";
import * as live from "./live.js";
import { command, empty, failed, searchField, segments, table, waiting } from "./parts.js";

export async function show({ content, name, view, query, signal, setQuery }) {
  const told = await get(url(["runs", name, "config"]), signal);
  const state = {
    mode: query.get("against") ? "diff" : (query.get("show") ?? "changed"),
    against: query.get("against") ?? "",
    find: "",
  };
  const place = h("div", {}, waiting());
  const others = [...live.runs.keys()].filter((each) => each !== name).sort();
  const picker = h(
    "select",
    { "aria-label": "Compare with", onchange: () => change({ against: picker.value }) },
    h("option", { value: "" }, "Another run…"),
    others.map((each) => h("option", { value: each, selected: each === state.against }, each)),
  );
  const change = (next) => {
    Object.assign(state, next);
    setQuery({ show: state.mode, against: state.mode === "diff" ? state.against : "" });
    picker.hidden = state.mode !== "diff";
    draw();
  };
  const draw = async () => {
    try {
      put(place, await body(told, view, state, signal));
    } catch (error) {
      if (error.name !== "AbortError") put(place, failed(error));
    }
  };
  const modes = [
    ["changed", "Changed"],
    ["all", "All"],
    ["yaml", "YAML"],
    ["diff", "Compare with a run"],
  ];
  put(
    content,
    h(
      "div",
      { class: "controls" },
      segments("What to show", modes, state.mode, (mode) => change({ mode })),
      picker,
      searchField("Find an option", "", (find) => change({ find })),
    ),
    place,
  );
  change({});
}

async function body(told, view, { mode, against, find }, signal) {
  const { name } = view.row;
  const fits = (key) => key.toLowerCase().includes(find.toLowerCase());
  if (mode === "yaml") return h("pre", { class: "panel yaml" }, visible(told.yaml));
  if (mode === "diff") {
    if (!against) return empty("No run selected", "Choose a run above.");
    const { rows } = await get(url(["runs", name, "diff", against]), signal);
    const shown = rows.filter(({ key }) => fits(key));
    if (!shown.length) return empty("No differences", "All options are the same.");
    const same = view.commands.show?.replace("runs show", "runs compare") + " " + against + where;
    return [
      view.commands.show && command(same),
      table(
        "Options that differ",
        ["Option", name, against],
        shown.map(({ key, values }) => [
          h("code", {}, key),
          value(values[0], "minus"),
          value(values[1], "plus"),
        ]),
      ),
    ];
  }
  const changed = new Set(told.changed);
  const keys = Object.keys(told.options).filter((key) => fits(key) && (mode === "all" || changed.has(key)));
  if (!keys.length)
    return empty(
      "No options",
      mode === "changed" ? "Every option has its default." : "No option matches.",
    );
  const rows = keys.map((key) => [
    h("code", { class: changed.has(key) ? "changed" : null }, key),
    value(told.options[key]),
  ]);
  return [
    h(
      "p",
      { class: "soft note" },
      counted(told.changed.length, "option") +
        " of " +
        Object.keys(told.options).length +
        " differ from the defaults.",
    ),
    table("Options", ["Option", "Value"], rows),
  ];
}

function value(given, kind = null) {
  return h("code", { class: "value " + (kind ?? "") }, visible(plain(given)));
}
