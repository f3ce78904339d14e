// One episode, or all members of its group side by side: turns with tool calls and results, rewards, and tokens.
import { get, url } from "./api.js";
import { h, put, visible } from "./dom.js";
import { barOf } from "./figures.js";
import { counted, duration, number, plain, signed, taskOf } from "./format.js";
import { button, failed, iconButton, pairs, segments } from "./parts.js";
import { conversation, messages } from "./turns.js";
import { legend, spread } from "./tokens.js";
import { forkTree } from "./tree.js";

const WAYS = [
  ["text", "Text"],
  ["advantage", "Advantage"],
  ["logprob", "Log-prob"],
  ["difference", "Sampler vs learner"],
];

export class Detail {
  /** `way`: how tokens are coloured. `group`: all members are shown. */
  constructor({ name, signal, way, group, changed, move, show, close, filterBy }) {
    Object.assign(this, { name, signal, group, changed, move, show, close, filterBy, number: null });
    this.way = WAYS.some(([each]) => each === way) ? way : "text";
    this.groups = new Map();
    this.bar = h("div", { class: "bar" });
    this.body = h("div", { class: "body" });
    this.element = h("section", { class: "detail", "aria-label": "Episode" }, this.bar, this.body);
    this.clear();
  }

  clear() {
    this.number = null;
    this.bar.hidden = true;
    put(this.body, h("p", { class: "waiting" }, "Choose an episode with the mouse, or with j and k."));
  }

  async open(wanted) {
    this.number = wanted;
    this.bar.hidden = false;
    this.drawBar();
    try {
      const view = await get(url(["runs", this.name, "episodes", wanted]), this.signal);
      if (this.number !== wanted) return;
      this.view = view;
      await this.draw();
    } catch (error) {
      if (error.name !== "AbortError" && this.number === wanted) put(this.body, failed(error));
    }
  }

  drawBar() {
    const choose = (group) => {
      this.group = group === "1";
      this.changed();
      this.draw();
    };
    const colour = (way) => {
      this.way = way;
      this.changed();
      this.draw();
    };
    put(
      this.bar,
      button("All episodes", this.close, { iconName: "list", class: "small back" }),
      iconButton("left", "Previous episode (k)", () => this.move(-1)),
      iconButton("right", "Next episode (j)", () => this.move(1)),
      segments(
        "What to show",
        [
          ["", "Episode"],
          ["1", "Group"],
        ],
        this.group ? "1" : "",
        choose,
      ),
      segments("Token colouring", WAYS, this.way, colour),
    );
  }

  toggleGroup() {
    if (this.number === null) return;
    this.group = !this.group;
    this.changed();
    this.drawBar();
    this.draw();
  }

  nextWay() {
    const at = WAYS.findIndex(([way]) => way === this.way);
    this.way = WAYS[(at + 1) % WAYS.length][0];
    this.changed();
    this.drawBar();
    this.draw();
  }

  one(view, credit, way) {
    return one(view, credit, way, this.filterBy, this.show);
  }

  /** Draws the selection. Credit and groups are fetched on demand, because they need a model's tokenizer. */
  async draw() {
    const { view, way, number: wanted } = this;
    if (!view) return;
    if (!this.group && way === "text") return void put(this.body, this.one(view, null, "text"));
    const { step, task, group: own } = view.row;
    const learner = way === "difference"; // needs the model itself
    const key = own + (learner ? "/learner" : "");
    if (!this.groups.has(key))
      put(
        this.body,
        h(
          "p",
          { class: "legend-note", role: "status", "aria-busy": "true" },
          learner
            ? "Loading the weights that sampled this group, to compute the learner's log-probs…"
            : "Computing the token credit of the group; the first time takes longer…",
        ),
        this.one(view, null, "text"),
      );
    try {
      if (!this.groups.has(key))
        this.groups.set(
          key,
          await get(url(["runs", this.name, "groups"], { step, task, group: own, learner }), this.signal),
        );
      if (this.number !== wanted || this.way !== way) return;
      const group = this.groups.get(key);
      const credit = group.members.find((member) => member.row.number === view.row.number)?.credit ?? null;
      const told = credit ?? group.members.find((member) => member.credit)?.credit ?? null;
      const known = !learner || spread(group) !== null;
      const note = known ? way !== "text" && legend(way, told) : await this.difference(view);
      const notes = (group.notes ?? [])
        .filter((text) => text !== told?.note)
        .map((text) => h("p", { class: "soft note" }, text));
      const drawn = known ? way : "text";
      put(
        this.body,
        note,
        notes,
        this.group ? members(group, drawn) : this.one(view, credit, drawn),
      );
    } catch (error) {
      if (error.name === "AbortError" || this.number !== wanted) return;
      put(
        this.body,
        h("p", { class: "why", role: "alert" }, "Cannot compute the token credit: " + error.message),
        this.one(view, null, "text"),
      );
    }
  }

  /** Returns a note with the step's mean difference between sampler and learner, if there are no values per token. */
  async difference({ row }) {
    const told = await get(url(["runs", this.name, "metrics"]), this.signal);
    const at = told.steps.indexOf(row.step);
    const value = told.series.logprob_diff?.[at];
    const known =
      value === undefined || value === null
        ? "it was not measured in this step"
        : `at step ${row.step} it was ${number(value)} on average`;
    return h(
      "p",
      { class: "legend-note" },
      `The log-prob difference of sampler and learner is not available per token: ${known} (logprob_diff in the run's curves).`,
    );
  }
}

/** One episode in full. */
function one(view, credit, way, filterBy, show) {
  const { row, task } = view;
  const title = h("h2", {}, visible(taskOf(row)));
  const more = h(
    "span",
    { class: "soft" },
    `step ${row.step ?? "–"} · member ${row.member} · line ${number(row.number)}`,
  );
  const alike = h(
    "button",
    { type: "button", class: "small", onclick: () => filterBy({ task: row.task }) },
    "All episodes of this task",
  );
  return h(
    "article",
    { class: "episode" },
    h("header", {}, title, more, alike),
    problem(view, credit),
    facts(row),
    h("div", { class: "answers" }, answer("Answer", view.answer), answer("Expected", task?.answer)),
    rewards(view),
    view.tree.length > 0 && forkTree(view.tree, row.member, show),
    h("div", { class: "talk" }, messages(view.prompt), conversation(view, credit, way)),
    metadata(task),
  );
}

function problem(view, credit) {
  const why = view.problem ?? view.row.error ?? (credit?.left_out ? "Not trained: " + credit.left_out : null);
  return why && h("p", { class: view.problem || view.row.error ? "why" : "legend-note" }, visible(why));
}

function facts(row) {
  const tools =
    number(row.tool_calls) +
    (row.tool_failures ? `, ${row.tool_failures} failed` : "") +
    (row.cached ? `, ${row.cached} from the cache` : "");
  const tiles = [
    ["Reward", number(row.reward)],
    ["Status", row.status.replace("_", " ")],
    ["Turns", row.turns],
    ["Tokens", number(row.tokens)],
    ["Tool calls", tools],
    ["Time", duration(row.seconds)],
  ];
  return h(
    "dl",
    { class: "tiles small" },
    tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, value))),
  );
}

function answer(name, text) {
  return (
    text !== null &&
    text !== undefined &&
    text !== "" &&
    h("div", {}, h("h3", {}, name), h("pre", {}, visible(plain(text))))
  );
}

/** The parts of the reward, and the reward of each turn. */
export function rewards({ reward }) {
  if (!reward) return h("p", { class: "soft note" }, "This episode was not scored, so it has no reward.");
  const parts = Object.entries(reward.parts).map(([name, value]) => [visible(name), value]);
  const steps = reward.steps.map((value, at) => ["turn " + (at + 1), value]);
  const rows = [
    ["outcome", reward.outcome],
    ...parts.map(([name, value]) => ["part " + name, value]),
    ...steps,
  ];
  if (rows.length < 2) return null;
  const largest = Math.max(...rows.map(([, value]) => Math.abs(value)));
  return h(
    "section",
    { class: "rewards" },
    h("h3", {}, "Reward"),
    h(
      "dl",
      { class: "bars" },
      rows.map(([name, value]) => [
        h("dt", {}, name),
        h("dd", {}, barOf(value, largest), h("span", { class: "num" }, signed(value))),
      ]),
    ),
  );
}

function metadata(task) {
  const rows = Object.entries(task?.metadata ?? {});
  return (
    rows.length > 0 &&
    h(
      "details",
      { class: "metadata" },
      h("summary", {}, "Task metadata"),
      pairs(rows.map(([key, value]) => [visible(key), h("code", {}, visible(plain(value)))])),
    )
  );
}

/** The members of a group side by side, under the prompt that they share. */
function members(group, way) {
  const [first] = group.members;
  const rewardsOf = group.members.map(({ row }) => row.reward).filter((reward) => reward !== null);
  const mean = rewardsOf.length ? rewardsOf.reduce((sum, each) => sum + each, 0) / rewardsOf.length : null;
  const told = `step ${group.step} · ${counted(group.members.length, "member")} · mean reward ${number(mean)}`;
  return h(
    "article",
    { class: "episode" },
    h(
      "header",
      {},
      h("h2", {}, visible(first ? taskOf(first.row) : group.task)),
      h("span", { class: "soft" }, told),
    ),
    first && h("div", { class: "talk" }, messages(first.prompt)),
    h(
      "div",
      { class: "members", tabindex: "0", role: "region", "aria-label": "Members of the group" },
      group.members.map((member) => column(member, way)),
    ),
  );
}

function column(member, way) {
  const { row, credit } = member;
  const left = credit?.left_out && h("p", { class: "soft note" }, "not trained: " + credit.left_out);
  return h(
    "section",
    { class: "member", "aria-label": "Member " + row.member },
    h(
      "header",
      {},
      h("b", {}, "Member " + row.member),
      h("span", { class: "status status-" + row.status }, row.status.replace("_", " ")),
      h("b", { class: "num score" }, number(row.reward)),
    ),
    left,
    rewards(member),
    conversation(member, credit, way),
  );
}
