// Runs: a live table of all runs, with filters, sorting, and overlaid curves of the selected runs.
import { debounce, h, put, scroller } from "./dom.js";
import { interval, spark } from "./figures.js";
import { ago, counted, duration, measured, moment, number, percent } from "./format.js";
import { keys } from "./keys.js";
import * as live from "./live.js";
import { Overlay } from "./overlay.js";
import { button, empty, progress, searchField, select, stateBadge, waiting } from "./parts.js";

const STATES = ["running", "finished", "interrupted", "failed", "killed", "unreadable"];
const COLUMNS = [
  { key: "name", text: "Run", of: (row) => row.name },
  { key: "state", text: "State", of: (row) => STATES.indexOf(row.state) },
  { key: "algorithm", text: "Algorithm", of: (row) => row.algorithm, class: "c-algorithm" },
  { key: "model", text: "Model", of: (row) => row.model, class: "c-model" },
  { key: "environment", text: "Environment", of: (row) => row.environment ?? "", class: "c-environment" },
  {
    key: "progress",
    text: "Progress",
    of: (row) => (row.steps ? row.step / row.steps : 0),
    class: "c-progress",
  },
  { key: "reward", text: "Reward or loss", of: (row) => row.reward ?? -Infinity, class: "c-curve" },
  {
    key: "heldout",
    text: "Held-out success",
    of: (row) => row.heldout?.value ?? -Infinity,
    class: "c-heldout",
  },
  { key: "speed", text: "Tokens/s", of: (row) => row.tokens_per_second ?? -Infinity, class: "num c-speed" },
  { key: "seconds", text: "Time", of: (row) => row.seconds, class: "num c-time" },
  { key: "updated", text: "Updated", of: (row) => row.updated, class: "num c-updated" },
];
const MOST_OVERLAID = 8;

export async function show(place) {
  const { query, signal } = place;
  const page = new RunsPage(place);
  page.find = query.get("find") ?? "";
  page.state = query.get("state") ?? "";
  page.sort = query.get("sort") ?? "updated";
  page.down = query.get("up") !== "1";
  page.selected = new Set((query.get("select") ?? "").split(",").filter(Boolean));
  page.build();
  live.on("runs", signal, (changed) => page.update(changed));
  const clock = setInterval(() => page.times(), 10_000);
  signal.addEventListener("abort", () => clearInterval(clock));
}

/** Highlights a changed row for a moment. */
function flash(row) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  row.animate([{ background: "var(--accent-soft)" }, {}], { duration: 1200 });
}

class RunsPage {
  constructor({ main, signal, setQuery }) {
    Object.assign(this, { main, signal, setQuery, rows: new Map(), at: null });
  }

  build() {
    this.summary = h("p", { class: "summary" });
    this.body = h("tbody", {});
    this.heads = COLUMNS.map((column) => this.headOf(column));
    const all = h("input", {
      type: "checkbox",
      "aria-label": "Select all shown",
      onchange: () => this.selectAll(all.checked),
    });
    this.all = all;
    const head = h("thead", {}, h("tr", {}, h("th", { class: "pick" }, all), this.heads));
    this.list = h("div", { class: "table runs" }, h("table", { "aria-label": "Runs" }, head, this.body));
    this.none = h("div", {});
    this.bar = h("div", { class: "selection", hidden: true });
    this.overlayPlace = scroller(
      h("div", {
        class: "overlay",
        hidden: true,
        role: "region",
        "aria-label": "Curves of the selected runs",
      }),
    );
    const filter = searchField(
      "Filter by name, model, environment, tag",
      this.find,
      debounce(80, (text) => this.set({ find: text })),
    );
    const states = [["", "All states"], ...STATES.map((state) => [state, state])];
    put(
      this.main,
      h(
        "header",
        { class: "head" },
        h("h1", {}, "Runs"),
        this.summary,
        h("div", { class: "actions" }, h("a", { class: "button main", href: "#/start" }, "Start a run")),
      ),
      h(
        "div",
        { class: "filters" },
        filter,
        select("State", states, this.state, (state) => this.set({ state })),
      ),
      this.bar,
      this.overlayPlace,
      this.list,
      this.none,
    );
    this.keyboard(filter.querySelector("input"));
    this.update(null);
  }

  headOf(column) {
    const sorted = () =>
      this.set({ sort: column.key, down: this.sort === column.key ? !this.down : column.key !== "name" });
    const head = h(
      "th",
      { scope: "col", class: column.class },
      h("button", { type: "button", onclick: sorted }, column.text),
    );
    head.column = column.key;
    return head;
  }

  keyboard(filter) {
    keys(this.signal, [
      ["j", "Next run", () => this.move(1)],
      ["k", "Previous run", () => this.move(-1)],
      ["Enter", "Open the run", () => this.at && (location.hash = "#/run/" + encodeURIComponent(this.at))],
      ["x", "Select the run", () => this.at && this.toggle(this.at)],
      ["/", "Filter", () => filter.focus()],
    ]);
  }

  set(change) {
    Object.assign(this, change);
    const { find, state, sort, down, selected } = this;
    this.setQuery({
      find,
      state,
      sort: sort === "updated" ? "" : sort,
      up: down ? "" : "1",
      select: [...selected].join(","),
    });
    this.update(null);
  }

  /** Redraws the rows in `changed`; null: all. */
  update(changed) {
    if (live.trouble && !live.runs.size)
      return void put(this.none, empty("Cannot read the runs", live.trouble));
    if (!live.loaded) return void put(this.none, waiting());
    for (const name of [...this.rows.keys()]) if (!live.runs.has(name)) this.rows.delete(name);
    for (const row of live.runs.values()) {
      const known = this.rows.get(row.name);
      if (!known) this.rows.set(row.name, this.rowOf(row));
      if (!known || changed === null || changed.has(row.name)) this.fill(this.rows.get(row.name), row);
      if (known && changed?.has(row.name)) flash(known);
    }
    const shown = this.shown();
    this.order(shown.map((row) => this.rows.get(row.name)));
    for (const head of this.heads) {
      if (head.column === this.sort) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    this.list.hidden = !shown.length;
    put(this.none, !shown.length && this.nothing());
    this.tellSummary(shown.length);
    this.tellSelection();
    return undefined;
  }

  /** Sorts the rows, only if the order has changed, because a moved row loses the focus. */
  order(rows) {
    const { children } = this.body;
    if (rows.length === children.length && rows.every((row, at) => row === children[at])) return;
    const focused = document.activeElement;
    this.body.replaceChildren(...rows);
    if (focused !== document.activeElement && this.body.contains(focused))
      focused.focus({ preventScroll: true });
  }

  nothing() {
    if (live.runs.size) return empty("No matching runs", "Change the filter or show all states.");
    return empty(
      "No runs yet",
      "Start a run here or with ",
      h("code", {}, "tfactory demo"),
      ". It appears here within a second.",
    );
  }

  shown() {
    const words = this.find.toLowerCase().split(/\s+/).filter(Boolean);
    const column = COLUMNS.find(({ key }) => key === this.sort) ?? COLUMNS.at(-1);
    const fits = (row) => {
      if (this.state && row.state !== this.state) return false;
      const tags = Object.entries(row.tags).map(([key, value]) => key + "=" + value);
      const text = [row.name, row.algorithm, row.model, row.environment, row.state, ...tags]
        .join(" ")
        .toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const order = (a, b) => {
      const [x, y] = [column.of(a), column.of(b)];
      const less = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return (this.down ? -less : less) || a.name.localeCompare(b.name);
    };
    return [...live.runs.values()].filter(fits).sort(order);
  }

  /** Creates a row. `fill` updates its cells in place, so that focus and clicks survive updates. */
  rowOf(row) {
    const pick = h("input", {
      type: "checkbox",
      "aria-label": "Select " + row.name,
      onchange: () => this.toggle(row.name),
    });
    const title = h("a", { href: "#/run/" + encodeURIComponent(row.name), title: row.name }, row.name);
    const name = h("td", { class: "name" }, h("div", { class: "title" }, title, h("span", {})), h("div", {}));
    const rest = COLUMNS.slice(1).map((column) => h("td", { class: column.class }));
    const made = h("tr", {}, h("td", { class: "pick" }, pick), name, rest);
    made.addEventListener(
      "click",
      (event) =>
        event.target.closest("a, input, button") || (location.hash = "#/run/" + encodeURIComponent(row.name)),
    );
    return made;
  }

  fill(made, row) {
    const [pick, name, state, algorithm, model, environment, steps, curve, held, speed, seconds, updated] =
      made.children;
    made.className = row.state + (this.at === row.name ? " at" : "");
    pick.firstChild.checked = this.selected.has(row.name);
    const tags = Object.entries(row.tags).map(([key, value]) =>
      h("span", { class: "tag" }, key + "=" + value),
    );
    const found = row.findings > 0 && h("span", { class: "tag warn" }, counted(row.findings, "finding"));
    put(name.firstChild.lastChild, tags, found);
    put(
      name.lastChild,
      h(
        "small",
        { class: "about" },
        row.steps > 0 &&
          h("span", { class: "steps-of-run" }, number(row.step) + " / " + number(row.steps) + " · "),
        [row.model, row.environment].filter(Boolean).join(" · "),
      ),
      row.problem && h("small", { class: "problem", title: row.problem }, row.problem),
    );
    put(state, stateBadge(row.state));
    put(algorithm, row.algorithm);
    put(model, row.model);
    model.title = row.model;
    put(environment, row.environment);
    put(steps, row.state !== "unreadable" && progress(row.step, row.steps));
    const loss = row.spark_of === "loss";
    put(
      curve,
      h(
        "span",
        { class: "curve" },
        spark(row.spark, row.spark_of),
        h("span", { class: "num" }, number(loss ? row.loss : row.reward, 3)),
        loss && row.spark.length > 0 && h("small", {}, "loss"),
      ),
    );
    put(
      held,
      row.heldout &&
        h(
          "span",
          { class: "curve", title: measured(row.heldout) },
          interval(row.heldout),
          h("span", { class: "num" }, percent(row.heldout.value)),
          row.heldout.by !== "training" && h("small", {}, "eval"),
        ),
    );
    put(speed, row.tokens_per_second && number(Math.round(row.tokens_per_second)));
    put(seconds, row.seconds > 0 && duration(row.seconds));
    put(updated, ago(row.updated));
    updated.dataset.updated = row.updated;
    updated.title = moment(row.updated);
  }

  times() {
    for (const cell of this.body.querySelectorAll("[data-updated]"))
      cell.textContent = ago(Number(cell.dataset.updated));
  }

  tellSummary(shown) {
    const rows = [...live.runs.values()];
    const told = STATES.map((state) => [state, rows.filter((row) => row.state === state).length]).filter(
      ([, count]) => count,
    );
    put(
      this.summary,
      shown < rows.length && h("span", {}, number(shown) + " of " + number(rows.length) + " shown"),
      told.map(([state, count]) =>
        h(
          "button",
          {
            type: "button",
            class: "bare",
            onclick: () => this.set({ state: this.state === state ? "" : state }),
            "aria-pressed": String(this.state === state),
          },
          h("b", { class: "num" }, count),
          stateBadge(state),
        ),
      ),
    );
  }

  move(by) {
    const shown = this.shown().map(({ name }) => name);
    const now = shown.indexOf(this.at);
    this.at = shown[Math.max(0, Math.min(shown.length - 1, now < 0 ? 0 : now + by))] ?? null;
    for (const [name, row] of this.rows) row.classList.toggle("at", name === this.at);
    this.rows.get(this.at)?.scrollIntoView({ block: "nearest" });
  }

  toggle(name) {
    const next = new Set(this.selected);
    if (!next.delete(name)) next.add(name);
    this.set({ selected: next });
  }

  selectAll(every) {
    this.set({ selected: new Set(every ? this.shown().map(({ name }) => name) : []) });
  }

  /** Shows the selected runs and the curves of the first MOST_OVERLAID, which colours can distinguish. */
  tellSelection() {
    const chosen = [...this.selected].filter((name) => live.runs.has(name));
    this.bar.hidden = !chosen.length;
    this.overlayPlace.hidden = !chosen.length;
    this.all.checked = chosen.length > 0;
    if (!chosen.length) return;
    const over = chosen.slice(0, MOST_OVERLAID);
    const note =
      chosen.length > MOST_OVERLAID &&
      h("span", { class: "soft" }, "curves of the first " + MOST_OVERLAID + " are shown");
    put(
      this.bar,
      h("b", {}, counted(chosen.length, "run") + " selected"),
      note,
      over.length === 2 &&
        h(
          "a",
          {
            class: "button small",
            href: `#/run/${encodeURIComponent(over[0])}/config?against=${encodeURIComponent(over[1])}`,
          },
          "Compare their configs",
        ),
      button("Clear", () => this.selectAll(false), { class: "small" }),
    );
    if (!this.overlay) {
      this.overlay = new Overlay(over, this.signal);
      put(this.overlayPlace, this.overlay.element);
    }
    if (this.drawn !== over.join()) this.overlay.choose(over);
    this.drawn = over.join();
  }
}
