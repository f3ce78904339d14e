// Overlaid curves of one or several runs, with their controls: used by the table of runs and by a run's page.
import { get, url } from "./api.js";
import { Board } from "./charts.js";
import { extend, sections } from "./curves.js";
import { debounce, h, put } from "./dom.js";
import { downloadCsv, fileName } from "./export.js";
import { meanData } from "./groups.js";
import { on } from "./live.js";
import { button, empty, searchField, segments } from "./parts.js";

export class Overlay {
  /** `names`: the runs to show; a group {label, members} is drawn as the mean of its runs. `kept`: view options from the address. `first`: element before the controls. */
  constructor(names, signal, kept = {}, changed = () => {}, first = null) {
    this.signal = signal;
    this.entries = names;
    this.runs = new Map();
    this.view = {
      log: kept.log === "1",
      smoothing: Number(kept.smooth ?? 0),
      time: kept.axis === "time",
      find: "",
    };
    this.changed = changed;
    this.place = h("div", { class: "board" });
    this.board = new Board(this.place, signal);
    this.element = h("div", {}, this.controls(first), this.place);
    on("metrics", signal, () => this.read());
    on("runs", signal, (news) => {
      const shown = this.element.offsetParent !== null;
      if (shown && this.names.some((name) => news?.has(name))) this.read();
    });
  }

  /** Returns the names of all runs that are drawn. */
  get names() {
    return this.entries.flatMap((entry) => entry.members ?? [entry]);
  }

  /** Shows these runs instead. */
  async choose(names) {
    this.entries = names;
    await this.read();
  }

  /** Reads the new metrics of each run, and draws. */
  async read() {
    if (this.reading) return void (this.again = true);
    this.reading = true;
    try {
      await Promise.all(this.names.map((name) => this.readOne(name)));
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") put(this.place, empty("Cannot read the metrics", error.message));
    } finally {
      this.reading = false;
    }
    if (this.again) {
      this.again = false;
      await this.read();
    }
  }

  async readOne(name) {
    const known = this.runs.get(name) ?? { offset: 0, steps: [], times: [], series: {} };
    const more = await get(url(["runs", name, "metrics"], { after: known.offset }), this.signal);
    // Resuming from a checkpoint truncates the file: discard what was read before.
    const whole = more.again ? { steps: [], times: [], series: {} } : known;
    whole.offset = more.offset;
    extend(whole, more);
    this.runs.set(name, whole);
    if (more.more) await this.readOne(name);
  }

  draw() {
    const made = sections(this.drawn(), this.view);
    if (made.length) this.board.draw(made, this.view);
    else {
      this.board.order = null;
      put(
        this.place,
        empty(this.view.find ? "No matching metric" : "No steps yet", "Curves appear after the first step."),
      );
    }
  }

  /** Returns what is drawn, [{name, data}]: the metrics of a run, or the means of a group. */
  drawn() {
    const read = (names) => names.filter((name) => this.runs.has(name)).map((name) => this.runs.get(name));
    return this.entries
      .map((entry) => {
        const parts = read(entry.members ?? [entry]);
        if (!parts.length) return null;
        return { name: entry.label ?? entry, data: parts.length > 1 ? meanData(parts) : parts[0] };
      })
      .filter(Boolean);
  }

  /** Saves all metrics of the runs that are drawn, a row for each run and step. */
  exportCsv() {
    const shown = this.drawn();
    const names = [...new Set(shown.flatMap(({ data }) => Object.keys(data.series)))].sort();
    const rows = shown.flatMap(({ name, data }) =>
      data.steps.map((step, at) => [
        name,
        step,
        data.times[at],
        ...names.map((each) => data.series[each]?.[at]),
      ]),
    );
    downloadCsv(fileName("metrics", ...shown.slice(0, 2).map(({ name }) => name)), [
      ["run", "step", "time", ...names],
      ...rows,
    ]);
  }

  controls(first) {
    const set = (change) => {
      Object.assign(this.view, change);
      this.draw();
      const { log, smoothing, time } = this.view;
      this.changed({ log: log ? "1" : "", smooth: smoothing || "", axis: time ? "time" : "" });
    };
    const told = h("output", { class: "num" }, this.view.smoothing.toFixed(2));
    const slow = debounce(60, (value) => set({ smoothing: value }));
    const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, "aria-label": "Smoothing" });
    slider.value = this.view.smoothing;
    slider.addEventListener("input", () => {
      told.textContent = Number(slider.value).toFixed(2);
      slow(Number(slider.value));
    });
    const reset = button("Whole range", () => this.board.zoom(null), { hidden: true, class: "small" });
    this.board.onzoom = (range) => (reset.hidden = range === null);
    const axis = (value) => {
      this.board.zoom(null);
      set({ time: value === "time" });
    };
    return h(
      "div",
      { class: "controls", role: "toolbar", "aria-label": "Curves" },
      first,
      segments(
        "Horizontal axis",
        [
          ["step", "Step"],
          ["time", "Time"],
        ],
        this.view.time ? "time" : "step",
        axis,
      ),
      segments(
        "Vertical scale",
        [
          ["", "Linear"],
          ["1", "Log"],
        ],
        this.view.log ? "1" : "",
        (value) => set({ log: value === "1" }),
      ),
      h("label", { class: "smoothing" }, "Smoothing", slider, told),
      reset,
      button("CSV", () => this.exportCsv(), { iconName: "download", title: "Save all metrics as CSV" }),
      searchField(
        "Find a metric",
        "",
        debounce(150, (find) => set({ find })),
      ),
    );
  }
}
