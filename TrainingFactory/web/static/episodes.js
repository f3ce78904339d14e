// Episodes: filters, a virtual list, and the selected episode or its group beside it.
import { debounce, h, put } from "./dom.js";
import { Detail } from "./episode.js";
import { EpisodeRows } from "./episode_rows.js";
import { counted, duration, number, percent, taskOf } from "./format.js";
import { keys } from "./keys.js";
import * as live from "./live.js";
import { button, empty, searchField, select } from "./parts.js";
import { VirtualList } from "./virtual.js";

const STATUSES = ["done", "max_turns", "truncated", "tool_failure", "error", "unreadable"];
const SORTS = [
  ["place", "Run's order"],
  ["reward", "Reward"],
  ["length", "Length"],
  ["seconds", "Time"],
];
const FILTERS = ["step", "task", "status", "failed_tool", "least", "most", "text", "sort", "down"];
const ROW = 34;

export async function show(place) {
  const page = new EpisodesPage(place);
  page.build();
  await page.load();
  const asked = Number(place.query.get("number"));
  if (asked) await page.open(asked, false);
}

class EpisodesPage {
  constructor({ content, name, view, query, signal, setQuery }) {
    Object.assign(this, { content, name, view, signal, setQuery, at: -1, number: null });
    this.filter = Object.fromEntries(FILTERS.map((key) => [key, query.get(key) ?? ""]));
    this.detail = new Detail({
      name,
      signal,
      way: query.get("colour") ?? "text",
      group: query.get("group") === "1",
      changed: () => this.keep(),
      move: (by) => this.move(by),
      show: (number) => this.open(number, true),
      close: () => this.close(),
      filterBy: (change) => this.change(change),
    });
  }

  build() {
    this.told = h("p", { class: "soft told", role: "status" });
    this.cleared = button("Clear", () => this.clear(), { class: "bare" });
    this.fresh = button("New episodes", () => this.load(), { class: "small", hidden: true });
    this.list = new VirtualList({
      label: "Episodes",
      height: ROW,
      rowOf: (at) => this.rowOf(at),
      need: (from, to) => this.rows?.need(from, to),
    });
    const heads = h(
      "div",
      { class: "row heads", "aria-hidden": "true" },
      ["Step", "Task", "Reward", "Status", "Turns", "Tokens", "Tools", "Time"].map((text) =>
        h("span", {}, text),
      ),
    );
    this.none = h("div", {});
    this.split = h(
      "div",
      { class: "split" },
      h("section", { class: "list", "aria-label": "Episodes" }, heads, this.list.element, this.none),
      this.detail.element,
    );
    put(this.content, this.filters(), this.split);
    const fit = () =>
      this.split.style.setProperty("--top", this.split.getBoundingClientRect().top + window.scrollY + "px");
    requestAnimationFrame(fit);
    addEventListener("resize", fit, { signal: this.signal });
    live.on("metrics", this.signal, (news) => news && (this.fresh.hidden = false));
    keys(this.signal, [
      ["j", "Next episode", () => this.move(1)],
      ["k", "Previous episode", () => this.move(-1)],
      ["ArrowDown", "", () => this.move(1)],
      ["ArrowUp", "", () => this.move(-1)],
      ["/", "Search the text of episodes", () => this.search.focus()],
      ["v", "Switch between episode and group", () => this.detail.toggleGroup()],
      ["c", "Next token colouring", () => this.detail.nextWay()],
      ["Escape", "Close the episode", () => this.close()],
    ]);
  }

  filters() {
    const typed = debounce(250, (change) => this.change(change));
    const field = (key, label, more) =>
      h("input", {
        "aria-label": label,
        placeholder: label,
        name: key,
        value: this.filter[key],
        oninput: (event) => typed({ [key]: event.target.value.trim() }),
        ...more,
      });
    const tools = [
      ["", "All tools"],
      ["*", "Any tool failed"],
      ...this.view.tools.map((tool) => [tool, tool + " failed"]),
    ];
    const text = searchField("Search the text", this.filter.text, (value) => typed({ text: value }));
    this.search = text.querySelector("input");
    const way = h("button", {
      type: "button",
      "aria-label": "Direction",
      title: "Reverse the order",
      onclick: () => this.change({ down: this.filter.down ? "" : "1" }),
    });
    this.way = way;
    return h(
      "form",
      { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      text,
      field("step", "Step", { type: "number", min: 1, class: "short" }),
      field("task", "Task id (exact)", { class: "middle", placeholder: "Task id" }),
      select(
        "Status",
        [["", "All statuses"], ...STATUSES.map((each) => [each, each.replace("_", " ")])],
        this.filter.status,
        (status) => this.change({ status }),
      ),
      select("Tool that failed", tools, this.filter.failed_tool, (tool) =>
        this.change({ failed_tool: tool }),
      ),
      h(
        "span",
        { class: "range" },
        field("least", "Reward from", {
          type: "number",
          step: "any",
          class: "short",
          placeholder: "Reward ≥",
        }),
        field("most", "Reward to", { type: "number", step: "any", class: "short", placeholder: "≤" }),
      ),
      h(
        "span",
        { class: "range" },
        select("Order", SORTS, this.filter.sort || "place", (sort) => this.change({ sort })),
        way,
      ),
      this.cleared,
      this.told,
      this.fresh,
    );
  }

  clear() {
    for (const input of this.content.querySelectorAll(".filters input")) input.value = "";
    for (const input of this.content.querySelectorAll(".filters select")) input.selectedIndex = 0;
    this.change(Object.fromEntries(FILTERS.map((key) => [key, ""])));
  }

  change(change) {
    Object.assign(this.filter, change);
    for (const [key, value] of Object.entries(change)) {
      const input = this.content.querySelector(`.filters input[name="${key}"]`);
      if (input && input !== document.activeElement) input.value = value;
    }
    this.keep();
    this.load();
  }

  keep() {
    this.split.classList.toggle("grouped", this.detail.group);
    this.setQuery({
      ...this.filter,
      number: this.number,
      group: this.detail.group ? "1" : "",
      colour: this.detail.way === "text" ? "" : this.detail.way,
    });
  }

  async load() {
    this.fresh.hidden = true;
    this.cleared.hidden = Object.values(this.filter).every((value) => !value);
    put(this.way, this.filter.down ? "↓" : "↑");
    this.rows?.end.abort(); // cancels requests of the previous filter
    const rows = new EpisodeRows(
      this.name,
      { ...this.filter },
      this.signal,
      () => rows === this.rows && this.refresh(),
    );
    this.rows = rows;
    this.list.top();
    await rows.begin();
    if (rows !== this.rows) return;
    this.at = rows.rows.findIndex((row) => row?.number === this.number);
  }

  refresh() {
    const { rows } = this;
    this.list.resize(rows.count);
    const none = rows.error ?? (rows.count === 0 && rows.ended);
    this.list.element.hidden = Boolean(none);
    put(this.none, none && this.nothing(rows));
    const shown =
      rows.matched === null ? number(rows.rows.length) + (rows.ended ? "" : " so far") : number(rows.matched);
    put(
      this.told,
      rows.direct || rows.matched === rows.total
        ? counted(rows.total, "episode")
        : `${shown} of ${counted(rows.total, "episode")}`,
      rows.building && `, ${percent(rows.indexed)} of the file read`,
    );
  }

  nothing(rows) {
    if (rows.error) return empty("Cannot read the episodes", rows.error.message);
    if (rows.total) return empty("No matching episodes", "Change or clear the filter.");
    return empty(
      "No episodes",
      "Runs that train on a dataset have none; others need logging.save_trajectories.",
    );
  }

  rowOf(at) {
    const row = this.rows?.rows[at];
    if (!row) return null;
    const chosen = row.number === this.number;
    const failures =
      row.tool_failures > 0 && h("b", { class: "failures" }, " " + row.tool_failures + " failed");
    const made = h(
      "div",
      {
        class: "row" + (chosen ? " at" : ""),
        role: "option",
        id: "episode-" + row.number,
        "aria-selected": String(chosen),
        onclick: () => this.pick(at),
      },
      h("span", { class: "num" }, row.step ?? "–"),
      h(
        "span",
        { class: "task", title: row.error ?? row.task },
        taskOf(row) || row.error,
        h("small", {}, " · " + row.member),
      ),
      h("span", { class: "reward num" }, meter(row.reward), number(row.reward, 3)),
      h("span", { class: "status status-" + row.status }, row.status.replace("_", " ")),
      h("span", { class: "num" }, row.turns),
      h("span", { class: "num" }, number(row.tokens)),
      h("span", { class: "num" }, row.tool_calls, failures),
      h("span", { class: "num" }, duration(row.seconds)),
    );
    return made;
  }

  move(by) {
    const next = Math.max(0, Math.min(this.rows.count - 1, this.at < 0 ? 0 : this.at + by));
    if (this.rows.rows[next]) this.pick(next);
  }

  pick(at) {
    this.at = at;
    this.list.reveal(at);
    this.open(this.rows.rows[at].number, true);
  }

  async open(number, keep) {
    this.number = number;
    this.split.classList.add("open");
    this.split.classList.toggle("grouped", this.detail.group);
    if (keep) this.keep();
    this.list.element.setAttribute("aria-activedescendant", "episode-" + number);
    this.list.draw();
    await this.detail.open(number);
  }

  close() {
    this.number = null;
    this.split.classList.remove("open");
    this.detail.clear();
    this.keep();
    this.list.draw();
  }
}

/** A reward as a short bar, clipped to 0..1. */
function meter(reward) {
  const share = Math.max(0, Math.min(1, reward ?? 0));
  return h("i", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: share * 100 + "%" } }));
}
