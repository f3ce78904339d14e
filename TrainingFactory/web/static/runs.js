// Runs: a live table of all runs, with filters, sorting, and overlaid curves of the selected runs.
import { debounce, flash, h, put, scroller } from "./dom.js";
import { downloadCsv } from "./export.js";
import { ago, number } from "./format.js";
import { GROUPINGS, described, groupCsv, groupEntries, groupRows, groupTable } from "./groups.js";
import { keys } from "./keys.js";
import * as live from "./live.js";
import { bulkMenu } from "./manage.js";
import { Overlay } from "./overlay.js";
import { button, empty, searchField, select, stateBadge, waiting } from "./parts.js";
import {
  STATES,
  chosenColumns,
  columnsButton,
  columnsOf,
  runsCsv,
  sortOptions,
  tagsOf,
} from "./runs_columns.js";

const NAME = { key: "name", text: "Run", of: (row) => row.name };
const ARCHIVED = "archived"; // a choice of the state filter
const MOST_OVERLAID = 8;

export async function show(place) {
  const { query, signal } = place;
  const page = new RunsPage(place);
  page.find = query.get("find") ?? "";
  page.state = query.get("state") ?? "";
  page.sort = query.get("sort") ?? "updated";
  page.down = query.get("up") !== "1";
  page.by = query.get("by") ?? "";
  page.selected = new Set((query.get("select") ?? "").split(",").filter(Boolean));
  page.build();
  live.on("runs", signal, (changed) => page.update(changed));
  const clock = setInterval(() => page.times(), 10_000);
  signal.addEventListener("abort", () => clearInterval(clock));
}

class RunsPage {
  constructor({ main, signal, setQuery }) {
    Object.assign(this, { main, signal, setQuery, rows: new Map(), at: null });
  }

  build() {
    this.summary = h("p", { class: "summary" });
    this.body = h("tbody", {});
    const all = h("input", {
      type: "checkbox",
      "aria-label": "Select all shown",
      onchange: () => this.selectAll(all.checked),
    });
    this.all = all;
    this.headRow = h("tr", {});
    this.table = h("table", { "aria-label": "Runs" }, h("thead", {}, this.headRow), this.body);
    this.list = scroller(h("div", { class: "table runs" }));
    this.useColumns();
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
    const states = [["", "All states"], ...STATES.map((state) => [state, state]), [ARCHIVED, "archived"]];
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
        select("Groups", GROUPINGS, this.by, (by) => this.set({ by })),
        select(
          "Order",
          sortOptions(this.columns),
          this.sort,
          (sort) => this.set({ sort, down: sort !== "name" }),
          {
            class: "phone-only",
          },
        ),
        h(
          "div",
          { class: "buttons" },
          columnsButton(
            () => this.shown(),
            () => this.useColumns(),
          ),
          button("CSV", () => this.exportCsv(), {
            iconName: "download",
            title: "Save the shown table as CSV",
          }),
        ),
      ),
      this.bar,
      this.overlayPlace,
      this.list,
      this.none,
    );
    this.keyboard(filter.querySelector("input"));
    this.update(null);
  }

  /** Rebuilds the table with the chosen columns. */
  useColumns() {
    const chosen = chosenColumns();
    this.columns = columnsOf(chosen);
    this.list.classList.toggle("chosen", chosen !== null);
    this.heads = [NAME, ...this.columns].map((column) => this.headOf(column));
    put(this.headRow, h("th", { class: "pick" }, h("label", { class: "tap" }, this.all)), this.heads);
    this.rows.clear();
    if (this.none) this.update(null);
  }

  exportCsv() {
    const shown = this.shown();
    if (this.by) downloadCsv("groups", groupCsv(groupRows(shown, this.by)));
    else downloadCsv("runs", runsCsv(shown, this.columns));
  }

  headOf(column) {
    const sorted = () =>
      this.set({ sort: column.key, down: this.sort === column.key ? !this.down : column.key !== "name" });
    const head = h(
      "th",
      { scope: "col", class: column.class },
      h("button", { type: "button", onclick: sorted, title: column.title }, column.text),
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
    const { find, state, by, sort, down, selected } = this;
    this.setQuery({
      find,
      state,
      by,
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
    this.drawList(shown);
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

  /** Draws the rows, or the table of their groups. */
  drawList(shown) {
    this.list.classList.toggle("grouped", this.by !== "");
    if (this.by)
      return void put(
        this.list,
        groupTable(groupRows(shown, this.by), this.selected, (names) => this.toggleAll(names)),
      );
    if (this.list.firstChild !== this.table) put(this.list, this.table);
    return this.order(shown.map((row) => this.rows.get(row.name)));
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
    const column = [NAME, ...this.columns].find(({ key }) => key === this.sort) ?? columnsOf(["updated"])[0];
    const rank = column.rank ?? column.of;
    const fits = (row) => {
      if (row.archived !== (this.state === ARCHIVED)) return false;
      if (this.state && this.state !== ARCHIVED && row.state !== this.state) return false;
      const tags = Object.entries(row.tags).map(([key, value]) => key + "=" + value);
      const text = [row.name, row.algorithm, row.model, row.environment, row.state, row.note, ...tags]
        .join(" ")
        .toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const order = (a, b) => {
      const [x, y] = [rank(a) ?? -Infinity, rank(b) ?? -Infinity];
      const text = typeof x === "string" || typeof y === "string";
      const less = text ? String(x).localeCompare(String(y), "en", { numeric: true }) : x === y ? 0 : x - y;
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
    const rest = this.columns.map(({ class: kind, text }) => h("td", { class: kind, "data-label": text }));
    const made = h("tr", {}, h("td", { class: "pick" }, h("label", { class: "tap" }, pick)), name, rest);
    made.addEventListener(
      "click",
      (event) =>
        event.target.closest("a, input, button, label") ||
        (location.hash = "#/run/" + encodeURIComponent(row.name)),
    );
    return made;
  }

  fill(made, row) {
    const [pick, name, ...cells] = made.children;
    made.className = row.state + (this.at === row.name ? " at" : "");
    pick.querySelector("input").checked = this.selected.has(row.name);
    put(name.firstChild.lastChild, tagsOf(row));
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
    this.columns.forEach(({ draw, of, title }, at) => {
      const content = draw ? draw(row) : of(row);
      put(cells[at], content === 0 ? "0" : content);
      cells[at].classList.toggle("none", !content && content !== 0);
      if (!draw && !title) cells[at].title = of(row) ?? "";
    });
  }

  times() {
    for (const cell of this.body.querySelectorAll("[data-updated]"))
      cell.textContent = ago(Number(cell.dataset.updated));
  }

  tellSummary(shown) {
    const rows = [...live.runs.values()].filter((row) => row.archived === (this.state === ARCHIVED));
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

  /** Selects runs, or clears them if all of them are selected. */
  toggleAll(names) {
    const next = new Set(this.selected);
    const all = names.every((name) => next.has(name));
    for (const name of names)
      if (all) next.delete(name);
      else next.add(name);
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
    const drawn = this.by ? groupEntries(chosen, live.runs, this.by) : chosen;
    const over = drawn.slice(0, MOST_OVERLAID);
    const note =
      drawn.length > MOST_OVERLAID &&
      h("span", { class: "soft" }, "curves of the first " + MOST_OVERLAID + " are shown");
    put(
      this.bar,
      h("b", {}, described(chosen.length, this.by && drawn.length)),
      note,
      chosen.length === 2 &&
        h(
          "a",
          {
            class: "button small",
            href: `#/run/${encodeURIComponent(chosen[0])}/config?against=${encodeURIComponent(chosen[1])}`,
          },
          "Compare their configs",
        ),
      bulkMenu(
        chosen.map((name) => live.runs.get(name)),
        (gone) => this.set({ selected: new Set(chosen.filter((name) => !gone.has(name))) }),
      ),
      button("Clear", () => this.selectAll(false), { class: "small" }),
    );
    if (!this.overlay) {
      this.overlay = new Overlay(over, this.signal);
      put(this.overlayPlace, this.overlay.element);
    }
    const key = JSON.stringify(over);
    if (this.drawn !== key) this.overlay.choose(over);
    this.drawn = key;
  }
}
