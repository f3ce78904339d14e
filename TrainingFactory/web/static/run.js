// A run: its state and metrics, and one of its views: curves, findings, episodes, config, lineage, log.
import { get, post, url } from "./api.js";
import { h, put } from "./dom.js";
import { duration, measured, number, percent } from "./format.js";
import { keys } from "./keys.js";
import * as live from "./live.js";
import { Jobs, archive, edit, evaluate, exportModel, remove } from "./manage.js";
import {
  act,
  button,
  command,
  confirm,
  dialog,
  menu,
  notFound,
  progress,
  stateBadge,
  tiles,
  toast,
  waiting,
} from "./parts.js";
import * as config from "./run_config.js";
import * as curves from "./run_curves.js";
import * as findings from "./run_findings.js";
import * as lineage from "./run_lineage.js";
import * as log from "./run_log.js";
import * as episodes from "./episodes.js";
import { tagsOf } from "./runs_columns.js";

const TABS = [
  ["", "Curves", curves],
  ["findings", "Findings", findings],
  ["episodes", "Episodes", episodes],
  ["config", "Config", config],
  ["lineage", "Lineage and files", lineage],
  ["log", "Log", log],
];

const PLAYING = ["grpo", "ppo", "rft"]; // algorithms with rewards, which are shown even before the first step

const SUMMED = ["", "findings"]; // views that show the metrics on top; the others need the space

export async function show(place) {
  const { main, parts, signal } = place;
  const [name, tab = ""] = parts;
  const shown = TABS.find(([path]) => path === tab);
  if (!shown || parts.length > 2) return put(main, notFound());
  const head = new Head(SUMMED.includes(shown[0]));
  const jobs = new Jobs(name, signal, () => reread(name, view, signal, draw));
  head.jobs = jobs;
  const content = h("div", { class: "view" }, waiting());
  const nav = h("nav", { class: "tabs", "aria-label": "Views of the run" });
  put(main, waiting());
  const view = await get(url(["runs", name]), signal);
  const heard = []; // callbacks that redraw the view after a change
  const draw = () => {
    head.update(view);
    drawTabs(nav, name, shown[0], view);
    for (const call of heard) call();
  };
  put(main, head.element, SUMMED.includes(shown[0]) && jobs.element, nav, content);
  draw();
  live.on("runs", signal, (changed) => {
    const row = live.runs.get(name);
    if (!row || (changed && !changed.has(name))) return;
    const ended = view.row.state !== row.state;
    view.row = row;
    draw();
    if (ended) reread(name, view, signal, draw);
  });
  live.on("findings", signal, () => reread(name, view, signal, draw));
  const at = TABS.indexOf(shown);
  const go = (by) => (location.hash = "#/" + pathOf(name, TABS[(at + by + TABS.length) % TABS.length][0]));
  keys(signal, [
    ["[", "Previous view", () => go(-1)],
    ["]", "Next view", () => go(1)],
  ]);
  return await shown[2].show({ ...place, content, name, view, changed: (call) => heard.push(call) });
}

async function reread(name, view, signal, draw) {
  try {
    Object.assign(view, await get(url(["runs", name]), signal));
    draw();
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message, "error");
  }
}

function pathOf(name, tab) {
  return "run/" + encodeURIComponent(name) + (tab ? "/" + tab : "");
}

function drawTabs(nav, name, current, view) {
  const open = view.findings.filter((each) => each.last_step === null).length;
  put(
    nav,
    TABS.map(([path, title]) =>
      h(
        "a",
        { href: "#/" + pathOf(name, path), "aria-current": path === current ? "page" : null },
        title,
        path === "findings" && open > 0 && h("span", { class: "tag warn" }, open),
      ),
    ),
  );
}

/** The header. Its buttons are recreated only when the state changes, so that updates lose no click. */
class Head {
  constructor(summed) {
    this.summed = summed;
    this.title = h("h1", {});
    this.state = h("span", {});
    this.what = h("span", { class: "soft" });
    this.actions = h("div", { class: "actions" });
    this.why = h("p", { class: "why", role: "alert" });
    this.tags = h("span", { class: "run-tags" });
    this.note = h("p", { class: "run-note" });
    this.numbers = h("div", {});
    this.element = h(
      "div",
      {},
      h("header", { class: "head" }, this.title, this.state, this.what, this.tags, this.actions),
      this.note,
      this.why,
      this.numbers,
    );
  }

  update(view) {
    const { row, reason } = view;
    const why = row.problem ?? reason;
    this.why.hidden = !why;
    if (this.why.textContent !== (why ?? "")) put(this.why, why);
    if (this.summed) put(this.numbers, numbers(view));
    const key = JSON.stringify([row.state, row.tags, row.note, row.archived, view.checkpoints.length]);
    if (this.shown === key) return;
    this.shown = key;
    put(this.tags, tagsOf({ ...row, findings: 0 }));
    put(this.note, row.note);
    this.note.hidden = !row.note;
    put(this.title, row.name);
    put(this.state, stateBadge(row.state));
    put(this.what, [row.algorithm, row.model, row.environment].filter(Boolean).join(" · "));
    put(this.actions, actions(view, this.jobs));
  }
}

const between = ({ low, high }) => (low === null ? "" : `${percent(low)} to ${percent(high)}, `);

/** The figures on top of the page. */
function numbers({ row }) {
  const left =
    row.state === "running" && row.step > 0 && row.steps
      ? (row.seconds / row.step) * (row.steps - row.step)
      : null;
  const held = row.heldout;
  const figures = [
    ["Progress", progress(row.step, row.steps), left !== null && "about " + duration(left) + " left"],
    row.spark_of === "reward" || (!row.spark.length && PLAYING.includes(row.algorithm))
      ? ["Reward", number(row.reward, 4), "at the last step"]
      : ["Loss", number(row.loss, 4), "at the last step"],
    [
      "Held-out success",
      held ? percent(held.value) : "–",
      held ? between(held) + measured(held) : "not evaluated",
    ],
    ["Tokens/s", row.tokens_per_second ? number(Math.round(row.tokens_per_second)) : "–", null],
    ["Time", duration(row.seconds), row.step > 0 && duration(row.seconds / row.step) + " per step"],
  ];
  return tiles(figures);
}

function actions(view, jobs) {
  const { row, commands } = view;
  const made = [];
  if (row.state === "running")
    made.push(
      button("Stop", (event) => stop(event.currentTarget, row.name), {
        iconName: "stop",
        class: "danger",
        id: "stop",
      }),
    );
  else if (["interrupted", "failed", "killed"].includes(row.state))
    made.push(
      button("Resume", (event) => resume(event.currentTarget, row.name, commands), {
        iconName: "resume",
        class: "main",
        id: "resume",
      }),
    );
  made.push(menu("Manage", managing(view, jobs), { id: "manage" }));
  made.push(button("Commands", () => showCommands(row.name, commands), { iconName: "copy" }));
  return made;
}

/** The actions of the menu: those that the state of the run allows. */
function managing(view, jobs) {
  const { row, checkpoints } = view;
  const after = async (started) => (await started) && jobs.read();
  const gone = async () => (await remove([row.name])).length && (location.hash = "#/runs");
  return [
    ["Edit name, tags, note…", () => edit(view.row)],
    checkpoints.length > 0 && ["Evaluate…", () => after(evaluate(view))],
    checkpoints.length > 0 && ["Export the model…", () => after(exportModel(view))],
    [row.archived ? "Unarchive" : "Archive", () => archive([row.name], !row.archived)],
    row.state !== "running" && ["Delete…", gone, "danger"],
  ].filter(Boolean);
}

async function stop(pressed, name) {
  const told = h(
    "p",
    {},
    "The run finishes its current step and saves a checkpoint, from which you can resume it. This is the same as Ctrl-C in its terminal.",
  );
  if (!(await confirm("Stop " + name + "?", told, "Stop the run", "danger"))) return;
  await act(pressed, async () => {
    const { command: same } = await post(url(["runs", name, "stop"]));
    toast(`Stopping ${name} after a checkpoint. The same in a terminal: ${same}`);
  });
}

async function resume(pressed, name, commands) {
  const told = h(
    "p",
    {},
    "The run continues from its last checkpoint, in a separate process that keeps running when you close this page.",
  );
  if (!(await confirm("Resume " + name + "?", [told, command(commands.resume)], "Resume the run"))) return;
  await act(pressed, async () => {
    await post(url(["runs", name, "resume"]));
    toast(name + " has resumed.", "good");
  });
}

function showCommands(name, commands) {
  const rows = Object.entries(commands).map(([what, text]) => command(text, what));
  dialog("Commands of " + name, [h("p", { class: "soft" }, "The same actions in a terminal."), rows]);
}
