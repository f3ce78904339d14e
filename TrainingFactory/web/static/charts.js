// Charts with uPlot: a board of cards that share cursor, zoom and x axis.
import { h, put } from "./dom.js";
import { downloadCsv, downloadPng, fileName } from "./export.js";
import { counted, duration, number } from "./format.js";
import { iconButton, table } from "./parts.js";
import { positive, powers, shareRange, spread, wide } from "./scales.js";

const uPlot = window.uPlot;
const HEIGHT = 168;
const TALL = 420;
const WHOLE = [...Array(8).keys()].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power)); // no half steps
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

/** Returns the colour of the n-th line in the current theme. */
export function colour(at) {
  return token("--line-" + ((at % 8) + 1));
}

function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Smooths with a bias-corrected exponential moving average; weight 0 returns the values unchanged. */
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let rest = 1;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    rest *= weight;
    return mean / (1 - rest);
  });
}

/**
 * A board of charts. A chart is {key, title, lines: [{label, x, y, low?, high?, colour, dash?}], share?}; x and y have
 * no gaps. `view` is {log, smoothing, time}: how all of them are drawn.
 */
export class Board {
  constructor(element, signal) {
    this.element = element;
    this.cards = new Map();
    this.zoomed = null;
    this.whole = [0, 1]; // of the x axis, the same for all
    this.sync = uPlot.sync(String(Math.random()));
    this.onzoom = () => {};
    document.addEventListener("theme", () => this.cards.forEach((card) => card.rebuild()), { signal });
    const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => target.card?.resize()));
    this.sizes = sizes;
    signal.addEventListener("abort", () => {
      sizes.disconnect();
      this.cards.forEach((card) => card.plot?.destroy());
    });
  }

  /** Draws these sections, [{title, charts}], and keeps the cards that stay. */
  draw(sections, view) {
    const kept = new Set();
    this.whole = ends(sections);
    const shown = sections.map(({ title, charts, folded }) => {
      const cards = charts.map((chart) => {
        kept.add(chart.key);
        const card = this.cards.get(chart.key) ?? new Card(this, chart.key);
        this.cards.set(chart.key, card);
        card.show(chart, view);
        return card.element;
      });
      return { title, cards, folded };
    });
    for (const [key, card] of this.cards) if (!kept.has(key)) this.drop(key, card);
    const order = shown.map(({ title, cards }) => title + cards.length).join();
    if (order === this.order) return;
    this.order = order;
    put(
      this.element,
      shown.map(({ title, cards, folded }) => {
        const grid = h("div", { class: "charts" }, cards);
        if (folded) return h("details", { class: "section" }, h("summary", {}, h("h2", {}, title)), grid);
        return h("section", { class: "section", "aria-label": title }, title && h("h2", {}, title), grid);
      }),
    );
  }

  drop(key, card) {
    card.plot?.destroy();
    this.sizes.unobserve(card.canvas);
    this.cards.delete(key);
  }

  zoom(range) {
    this.zoomed = range;
    this.cards.forEach((card) => card.applyZoom());
    this.onzoom(range);
  }
}

class Card {
  constructor(board, key) {
    this.board = board;
    this.key = key;
    this.tall = false;
    this.title = h("h3", {});
    this.value = h("output", { class: "value" });
    this.legend = h("div", { class: "legend" });
    this.canvas = h("div", { class: "canvas", role: "img", tabindex: "0" });
    this.canvas.card = this;
    this.values = h("div", { class: "values" });
    const grow = iconButton("wide", "Enlarge, with a table of values", () => this.grow());
    const image = iconButton("image", "Save the chart as PNG", () => this.exportPng());
    const data = iconButton("download", "Save the values as CSV", () => this.exportCsv());
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, this.title, image, data, grow, this.value),
      this.legend,
      this.canvas,
      this.values,
    );
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    board.sizes.observe(this.canvas);
  }

  /** Shows new lines; if only the data has changed, updates it in place. */
  show(chart, view) {
    this.chart = chart;
    this.view = view;
    this.title.textContent = chart.title;
    const shape = JSON.stringify([
      chart.lines.map(({ label, low, dash, y }) => [label, !!low, dash, y.length === 1]),
      this.log,
      view.smoothing > 0,
      view.time,
    ]);
    const data = this.table();
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.applyZoom();
    } else this.rebuild();
    this.shape = shape;
    this.describe();
    if (this.tall) this.tell();
  }

  /** The scale stays linear if no value is above zero. */
  get log() {
    return this.view.log && this.chart.lines.some(({ y }) => y.some((value) => value > 0));
  }

  /** Returns uPlot's columns: x, then for each line its curve, the raw values if smoothed, and its band. */
  table() {
    const { smoothing } = this.view;
    const drawn = this.log ? positive : (values) => values;
    const tables = this.chart.lines.map(({ x, y, low, high, sparse }) => {
      const weight = sparse ? 0 : smoothing; // do not smooth lines of a few points
      const columns = [x, drawn(smooth(y, weight))];
      if (smoothing) columns.push(drawn(y));
      if (low) columns.push(drawn(smooth(high, weight)), drawn(smooth(low, weight)));
      return columns;
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (this.canvas.clientWidth) this.make(this.canvas.clientWidth);
  }

  make(width) {
    this.plot = new uPlot(this.options(width), this.table(), this.canvas);
    this.applyZoom();
    this.tellLegend(null);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (!this.plot) this.make(width);
    else this.plot.setSize({ width, height: this.height });
  }

  get height() {
    return this.tall ? TALL : HEIGHT;
  }

  options(width) {
    const { smoothing, time } = this.view;
    const { log } = this;
    const series = [{}];
    const bands = [];
    const spare = { show: true, points: { show: false }, spanGaps: true, width: 0 };
    for (const { low, dash, at, sparse, y } of this.chart.lines) {
      const stroke = colour(at);
      series.push({
        stroke,
        width: 1.75,
        spanGaps: true,
        dash: DASHES[(dash ?? 0) % DASHES.length],
        points: { show: !!sparse || y.length === 1, size: 5, fill: stroke }, // one point makes no line
      });
      if (smoothing)
        series.push({ stroke: stroke + "44", width: 1, spanGaps: true, points: { show: false } });
      if (low) {
        bands.push({ series: [series.length, series.length + 1], fill: stroke + "26" });
        series.push(spare, spare);
      }
    }
    const axis = {
      stroke: token("--faint"),
      grid: { stroke: token("--grid"), width: 1 },
      ticks: { show: false },
      font: "11px " + token("--sans"),
    };
    const xs = (_, ticks) => ticks.map((tick) => (time ? duration(tick) : number(tick)));
    const ys = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)));
    return {
      width,
      height: this.height,
      series,
      bands,
      legend: { show: false },
      padding: [6, 10, 0, 0],
      scales: {
        x: { time: false },
        y: { distr: log ? 3 : 1, range: log ? undefined : this.chart.share ? shareRange : spread },
      },
      axes: [
        { ...axis, values: xs, size: 26, space: time ? 76 : 50, ...(time ? {} : { incrs: WHOLE }) },
        {
          ...axis,
          grid: log ? { ...axis.grid, filter: powers } : axis.grid,
          values: ys,
          size: wide,
          space: 30,
        },
      ],
      cursor: {
        sync: { key: this.board.sync.key, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        y: false,
        points: { size: 6 },
        bind: { dblclick: () => () => (this.board.zoom(null), null) },
      },
      hooks: {
        setCursor: [(plot) => this.tellLegend(plot.cursor.idx)],
        setSelect: [(plot) => this.selected(plot)],
      },
    };
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.board.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  applyZoom() {
    if (!this.plot) return;
    const [min, max] = this.board.zoomed ?? this.board.whole;
    const room = max > min ? 0 : 1; // a single step stands in the middle
    this.plot.setScale("x", { min: min - room, max: max + room });
  }

  /** Zooms around the cursor; resets the zoom if the range covers everything. */
  closer(factor) {
    const { min, max } = this.plot.scales.x;
    const [first, last] = this.board.whole;
    const wide = (max - min) * factor;
    if (wide >= last - first) return this.board.zoom(null);
    const at = this.plot.data[0][this.plot.cursor.idx] ?? (min + max) / 2;
    const from = Math.max(first, Math.min(last - wide, at - wide / 2));
    return this.board.zoom([from, from + wide]);
  }

  /** Moves the cursor by the arrow keys, and zooms by + and -; 0 shows the whole range. */
  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const factor = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity }[event.key];
    if (!this.plot || !(step || factor) || event.ctrlKey || event.metaKey) return undefined;
    event.preventDefault();
    if (factor) return this.closer(factor);
    const last = this.plot.data[0].length - 1;
    const at = Math.max(0, Math.min(last, (this.plot.cursor.idx ?? (step > 0 ? -1 : last + 1)) + step));
    return this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][at], "x"), top: 10 });
  }

  /** Writes the values under the cursor, or the last ones. */
  tellLegend(at) {
    if (!this.plot) return;
    const [xs, ...rest] = this.plot.data;
    const wide = (line) => 1 + (this.view.smoothing ? 1 : 0) + (line.low ? 2 : 0);
    let column = 0;
    const told = this.chart.lines.map((line) => {
      const values = rest[column] ?? [];
      column += wide(line);
      const value = at === null || at === undefined ? last(values) : near(values, at);
      return { label: line.label, value, at: line.at, dash: line.dash };
    });
    const x =
      at === null || at === undefined
        ? ""
        : (this.view.time ? duration(xs[at]) : "step " + number(xs[at])) + ": ";
    put(this.value, told.length === 1 ? [h("small", {}, x), number(told[0].value)] : h("small", {}, x));
    if (told.length < 2) return put(this.legend);
    return put(
      this.legend,
      told.map(({ label, value, at: place, dash }) =>
        h(
          "span",
          { class: "key" + (dash ? " dashed" : ""), style: { "--key": colour(place) } },
          h("i", {}),
          label,
          h("b", {}, number(value)),
        ),
      ),
    );
  }

  describe() {
    const told = this.chart.lines.map(
      ({ label, y }) =>
        `${label}: ${counted(y.length, "point")}, from ${number(y[0])} to ${number(y.at(-1))}`,
    );
    this.canvas.setAttribute("aria-label", this.chart.title + ". " + told.join("; "));
    this.tellLegend(this.plot?.cursor.idx ?? null);
  }

  exportPng() {
    const lines = this.chart.lines.map(({ label, y, at }) => ({ label, value: last(y), colour: colour(at) }));
    const colours = { back: token("--surface"), text: token("--text"), soft: token("--soft") };
    const { plot } = this;
    const { title } = this.chart;
    downloadPng(fileName(title), { title, lines, plot, colours, font: token("--sans") });
  }

  exportCsv() {
    const { lines, title } = this.chart;
    const columns = lines.flatMap(({ label, low }) => [
      label,
      ...(low ? [label + " low", label + " high"] : []),
    ]);
    const tables = lines.map(({ x, y, low, high }) => (low ? [x, y, low, high] : [x, y]));
    const joined = uPlot.join(tables);
    const rows = joined[0].map((x, at) => [x, ...joined.slice(1).map((column) => column[at])]);
    downloadCsv(fileName(title), [[this.view.time ? "seconds" : "step", ...columns], ...rows]);
  }

  grow() {
    this.tall = !this.tall;
    this.element.classList.toggle("tall", this.tall);
    this.resize();
    this.tell();
  }

  /** Shows the values as a table below an enlarged chart. */
  tell() {
    if (!this.tall) return put(this.values);
    const { lines } = this.chart;
    const joined = lines.length ? uPlot.join(lines.map(({ x, y }) => [x, y])) : [[]];
    const rows = joined[0].map((x, at) => [
      this.view.time ? duration(x) : number(x),
      ...lines.map((_, n) => number(joined[n + 1][at])),
    ]);
    const heads = [this.view.time ? "time" : "step", ...lines.map(({ label }) => label)].map((text) => ({
      text,
      class: "num",
    }));
    return put(this.values, table(this.chart.title, heads, rows.reverse()));
  }
}

/** Returns where the first curve of all begins, and where the last one ends. */
function ends(sections) {
  const lines = sections.flatMap(({ charts }) => charts.flatMap((chart) => chart.lines));
  const [low, high] = [Math.min(...lines.map(({ x }) => x[0])), Math.max(...lines.map(({ x }) => x.at(-1)))];
  return low <= high ? [low, high] : [0, 1];
}

const last = (values) => values.findLast((value) => value !== null && value !== undefined);
const near = (values, at) => values[at] ?? last(values.slice(0, at)) ?? null;
