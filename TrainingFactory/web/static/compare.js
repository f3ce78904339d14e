// Comparison of two models on the same tasks, task by task.
import { get, url, where } from "./api.js";
import { h, put, scroller, visible } from "./dom.js";
import { number, percent, plain, signed } from "./format.js";
import { command, empty, failed, link, panel, segments, table, tiles, waiting } from "./parts.js";
import { conversation, messages } from "./turns.js";
import { rewards } from "./episode.js";

const MOST = 300; // tasks in the table

export async function show({ main, query, signal, setQuery }, models) {
  const state = {
    first: query.get("first") ?? "",
    second: query.get("second") ?? "",
    only: query.get("only") ?? "flipped",
  };
  const place = h("div", { class: "view" }, waiting());
  const names = models.flatMap(({ name, versions }) =>
    versions.map(({ number: each, aliases }) => [
      `${name}:${each}`,
      [`${name}:${each}`, ...aliases].join(", "),
    ]),
  );
  const picker = (side) =>
    h(
      "select",
      { "aria-label": side + " model", onchange: (event) => change({ [side]: event.target.value }) },
      h("option", { value: "" }, side === "first" ? "First…" : "Second…"),
      names.map(([value, text]) => h("option", { value, selected: value === state[side] }, text)),
    );
  let told = null;
  const draw = () => told && put(place, summary(told, state), tasks(told, state));
  const change = async (next) => {
    const other = next.first !== undefined || next.second !== undefined || !told;
    Object.assign(state, next);
    setQuery(state);
    if (!state.first || !state.second) return put(place, empty("No versions selected", "Choose two versions above."));
    try {
      if (other) told = await get(url(["compare"], { first: state.first, second: state.second }), signal);
      draw();
    } catch (error) {
      if (error.name !== "AbortError") put(place, failed(error));
    }
    return undefined;
  };
  const kinds = [
    ["flipped", "Flipped"],
    ["better", "Better"],
    ["worse", "Worse"],
    ["", "All"],
  ];
  put(
    main,
    h("header", { class: "head" }, h("h1", {}, link("registry", "Registry"), " / Compare")),
    h(
      "div",
      { class: "filters" },
      picker("first"),
      h("span", { class: "soft" }, "against"),
      picker("second"),
      segments("Tasks", kinds, state.only, (only) => change({ only })),
    ),
    place,
  );
  await change({});
}

function summary({ tasks: all, summary: told }, { first, second }) {
  const share = (side) => (all.length ? all.reduce((sum, task) => sum + task[side], 0) / all.length : null);
  const count = (kind) => all.filter(({ flipped }) => flipped === kind).length;
  const points = (value) => signed(Math.round(value * 1000) / 10);
  const range =
    told.difference_low !== undefined
      ? `${points(told.difference_low)} to ${points(told.difference_high)}`
      : null;
  const figures = [
    [first, percent(share("first")), null],
    [second, percent(share("second")), null],
    [
      "Difference in points",
      points(told.difference ?? share("second") - share("first")),
      range && "95%: " + range,
    ],
    ["p-value", told.p === undefined ? "–" : told.p < 0.001 ? "< 0.001" : number(told.p, 3), "paired test"],
    ["Now right", number(count("better")), "failed before"],
    ["Now wrong", number(count("worse")), "succeeded before"],
    ["Tasks", number(all.length), null],
  ];
  return [
    tiles(figures),
    command(`tfactory compare ${first} ${second}${where}`, "In a terminal"),
    (told.notes ?? []).map((text) => h("p", { class: "soft note" }, plain(text))),
  ];
}

function tasks({ tasks: all }, { first, second, only }) {
  const shown = all.filter(({ flipped }) => !only || (only === "flipped" ? flipped : flipped === only));
  if (!shown.length)
    return empty(
      only === "flipped" ? "No task flipped" : "No such task",
      "Both have the same result on all tasks.",
    );
  const rows = shown
    .slice(0, MOST)
    .map((task) => [
      task.episodes?.some(Boolean) ? pair(task, first, second) : h("code", {}, visible(task.task)),
      percent(task.first),
      percent(task.second),
      turned(task.flipped),
    ]);
  const heads = ["Task", { text: first, class: "num" }, { text: second, class: "num" }, ""];
  return [
    panel("Tasks", table("Tasks", heads, rows)),
    shown.length > MOST && h("p", { class: "soft note" }, `The first ${MOST} of ${number(shown.length)}.`),
  ];
}

function turned(flipped) {
  if (!flipped) return null;
  return h(
    "span",
    { class: "tag " + (flipped === "better" ? "accent" : "warn") },
    flipped === "better" ? "now right" : "now wrong",
  );
}

/** A task that opens to both episodes, side by side. */
function pair(task, first, second) {
  const place = scroller(h("div", { class: "members" }));
  const side = (episode, name) =>
    h(
      "section",
      { class: "member" },
      h("header", {}, h("b", {}, name), h("b", { class: "num score" }, number(episode?.row.reward))),
      episode
        ? [messages(episode.prompt), rewards(episode), conversation(episode, null, "text")]
        : h("p", { class: "soft" }, "Its episode was not recorded."),
    );
  return h(
    "details",
    {
      ontoggle: () =>
        place.childElementCount || put(place, side(task.episodes[0], first), side(task.episodes[1], second)),
    },
    h("summary", {}, h("code", {}, visible(task.task))),
    place,
  );
}
