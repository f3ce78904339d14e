// Labels for the episodes of a run: good or bad, or a score; saved as gold rows for judge audits.
import { get, post, url } from "./api.js";
import { h, put, visible } from "./dom.js";
import { counted, number, percent, plain } from "./format.js";
import { keys } from "./keys.js";
import { button, command, empty, failed, iconButton, panel, segments, select, toast } from "./parts.js";
import { conversation, messages } from "./turns.js";

const PAGE = 50;

export async function show(content, place) {
  const { runs } = await get(url(["runs"]), place.signal);
  const names = runs
    .filter(({ state, spark_of: of }) => state !== "unreadable" && of === "reward")
    .map(({ name }) => name)
    .reverse();
  if (!names.length)
    return void put(
      content,
      empty(
        "No episodes to label",
        "Runs that sample episodes, such as GRPO runs, are listed here.",
      ),
    );
  const page = new LabelPage(content, place, names);
  page.build();
  return await page.open(
    names.includes(place.query.get("run")) ? place.query.get("run") : names[0],
    Number(place.query.get("number")) || null,
  );
}

class LabelPage {
  constructor(content, { signal, query, setQuery }, names) {
    Object.assign(this, {
      content,
      signal,
      setQuery,
      names,
      rows: [],
      known: new Map(),
      at: -1,
      mode: query.get("by") === "score" ? "score" : "label",
      fresh: query.get("all") !== "1",
    });
  }

  build() {
    this.run = select(
      "Run",
      this.names.map((name) => [name, name]),
      this.names[0],
      (name) => this.open(name),
      { id: "label-run" },
    );
    const modes = segments(
      "Kind of label",
      [
        ["label", "Good or bad"],
        ["score", "Score"],
      ],
      this.mode,
      (mode) => {
        this.mode = mode;
        this.keepQuery();
        this.drawVerdicts();
      },
    );
    const which = segments(
      "Which episodes",
      [
        ["1", "Unlabelled"],
        ["", "All"],
      ],
      this.fresh ? "1" : "",
      (fresh) => {
        this.fresh = fresh === "1";
        this.keepQuery();
      },
    );
    this.body = h("div", { class: "inside" });
    this.verdicts = h("div", { class: "verdicts" });
    this.head = h("header", {});
    this.sideBody = h("div", {});
    put(
      this.content,
      h("div", { class: "filters" }, h("label", { class: "source" }, "Run ", this.run), modes, which),
      h(
        "div",
        { class: "labelling" },
        h("section", { class: "panel", "aria-label": "Episode" }, this.head, this.body, this.verdicts),
        h("aside", { class: "side" }, this.sideBody),
      ),
    );
    const verdict = (place) =>
      this.mode === "label" ? this.give({ label: place === 1 }) : this.give({ score: place });
    keys(this.signal, [
      ["1", "Good, or the score 1", () => verdict(1)],
      ["2", "Bad, or the score 2", () => verdict(2)],
      ...["0", "3", "4", "5", "6", "7", "8", "9"].map((digit) => [
        digit,
        "",
        () => this.mode === "score" && this.give({ score: Number(digit) }),
      ]),
      [" ", "Skip", () => this.move(1)],
      ["j", "Next episode", () => this.move(1)],
      ["k", "Previous episode", () => this.move(-1)],
      ["u", "Remove the label", () => this.give({})],
    ]);
  }

  keepQuery() {
    this.setQuery({
      run: this.name,
      number: this.rows[this.at]?.number,
      by: this.mode === "score" ? "score" : null,
      all: this.fresh ? null : "1",
    });
  }

  async open(name, wanted = null) {
    Object.assign(this, { name, rows: [], at: -1, next: null, ended: false });
    this.run.value = name;
    try {
      this.take(await get(url(["labels"], { run: name }), this.signal));
      if (wanted === null) return await this.move(1);
      while (!this.rows.some(({ number: each }) => each === wanted) && (await this.more()));
      return await this.show(
        Math.max(
          0,
          this.rows.findIndex(({ number: each }) => each === wanted),
        ),
      );
    } catch (error) {
      if (error.name !== "AbortError") put(this.body, failed(error));
    }
    return undefined;
  }

  take(labels) {
    this.labels = labels;
    this.known = new Map(labels.rows.map((row) => [row.number, row]));
    this.drawSide();
  }

  async more() {
    if (this.ended) return false;
    const page = await get(
      url(["runs", this.name, "episodes"], { limit: PAGE, after: this.next }),
      this.signal,
    );
    this.rows.push(...page.rows.filter(({ status }) => status !== "unreadable"));
    this.next = page.next;
    this.ended = page.next === null;
    return true;
  }

  async move(by) {
    let at = this.at + by;
    for (;;) {
      if (at < 0) return undefined;
      if (at >= this.rows.length && !(await this.more())) break;
      if (at < this.rows.length && (by < 0 || !this.fresh || !this.known.has(this.rows[at].number)))
        return await this.show(at);
      if (at < this.rows.length) at += 1;
    }
    put(this.head, h("h2", {}, "All labelled"));
    put(this.verdicts);
    return void put(
      this.body,
      empty("Every episode has a label", "Choose another run, or show all episodes."),
    );
  }

  async show(at) {
    const row = this.rows[at];
    if (!row) return this.move(1);
    this.at = at;
    try {
      const view = await get(url(["runs", this.name, "episodes", row.number]), this.signal);
      if (this.at !== at) return undefined;
      this.view = view;
      this.keepQuery();
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") put(this.body, failed(error));
    }
    return undefined;
  }

  draw() {
    const { view } = this;
    const expected = view.task?.answer;
    put(
      this.head,
      h("h2", {}, visible(view.row.task)),
      h("span", { class: "soft" }, `step ${view.row.step ?? "–"} · line ${number(view.row.number)}`),
      iconButton("left", "Previous episode (k)", () => this.move(-1)),
      iconButton("right", "Next episode (j)", () => this.move(1)),
    );
    put(
      this.body,
      expected !== null &&
        expected !== undefined &&
        h("p", {}, h("span", { class: "soft" }, "Expected: "), visible(plain(expected))),
      h("div", { class: "talk" }, messages(view.prompt), conversation(view, null, "text")),
    );
    this.drawVerdicts();
    this.drawSide();
    window.scrollTo(0, 0);
  }

  drawVerdicts() {
    if (!this.view) return;
    const found = this.known.get(this.view.row.number);
    const now = found?.task === this.view.row.task ? found : undefined; // the run may have been truncated and rewritten since
    const press = (on) => ({ "aria-pressed": String(on) });
    const key = (text) => h("kbd", { "aria-hidden": "true" }, text);
    const made =
      this.mode === "label"
        ? [
            h(
              "button",
              {
                type: "button",
                class: "good",
                id: "good",
                onclick: () => this.give({ label: true }),
                ...press(now?.label === true),
              },
              key("1"),
              "Good",
            ),
            h(
              "button",
              {
                type: "button",
                class: "danger",
                id: "bad",
                onclick: () => this.give({ label: false }),
                ...press(now?.label === false),
              },
              key("2"),
              "Bad",
            ),
          ]
        : h(
            "div",
            { class: "scores", role: "group", "aria-label": "Score" },
            [...Array(11).keys()].map((score) =>
              h(
                "button",
                { type: "button", onclick: () => this.give({ score }), ...press(now?.score === score) },
                score,
              ),
            ),
          );
    // The run's reward is shown only afterwards, because it would bias the label.
    const gave = now
      ? `The run's reward: ${number(this.view.row.reward)}.`
      : this.last || "The run's reward is shown after you have labelled the episode.";
    put(
      this.verdicts,
      made,
      h("button", { type: "button", onclick: () => this.move(1) }, key("space"), now ? "Next" : "Skip"),
      now && button("Remove label", () => this.give({})),
      h("span", { class: "gap" }),
      h("span", { class: "soft", role: "status" }, gave),
    );
  }

  async give(label) {
    if (!this.view || this.busy) return;
    const numbered = this.view.row.number;
    this.busy = true;
    try {
      this.take(await post(url(["labels"]), { run: this.name, number: numbered, ...label }, this.signal));
      const given = Object.keys(label).length > 0;
      this.last =
        given &&
        `Line ${number(numbered)}: ${label.label === true ? "good" : label.label === false ? "bad" : label.score}; the run's reward: ${number(this.view.row.reward)}.`;
      if (given) await this.move(1);
      else this.draw();
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "error");
    } finally {
      this.busy = false;
    }
  }

  drawSide() {
    const { rows, unread, command: audit, path } = this.labels;
    const good = rows.filter(({ label }) => label === true).length;
    const bad = rows.filter(({ label }) => label === false).length;
    const both = rows.filter(({ label, reward }) => label !== null && reward !== null);
    const same = both.filter(({ label, reward }) => reward >= 0.5 === label).length;
    const facts = [
      ["Labels", number(rows.length)],
      ["Good", number(good)],
      ["Bad", number(bad)],
      ["Agrees with the reward", both.length ? percent(same / both.length) : "–"],
    ];
    const list = [...rows].reverse().map((row) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button",
            class: row.number === this.view?.row.number ? "at" : "",
            onclick: () => this.jump(row.number),
          },
          h("span", { class: "num soft" }, row.number),
          h("span", {}, visible(row.task)),
          h(
            "span",
            { class: "tag " + (row.label === true ? "good" : row.label === false ? "bad" : "") },
            row.label === true ? "good" : row.label === false ? "bad" : number(row.score),
          ),
        ),
      ),
    );
    put(
      this.sideBody,
      h(
        "dl",
        { class: "tiles small" },
        facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, value))),
      ),
      h(
        "div",
        { class: "view" },
        panel(
          "Audit a judge with these labels",
          h(
            "div",
            { class: "commands" },
            command(audit),
            h(
              "p",
              { class: "soft" },
              "The labels are saved in ",
              h("code", {}, path),
              unread > 0 && `; ${counted(unread, "line")} of it were not written by this page`,
              ".",
            ),
          ),
        ),
        rows.length > 0 && panel("Labelled", h("ul", { class: "labelled-list" }, list)),
      ),
    );
  }

  async jump(wanted) {
    while (!this.rows.some(({ number: each }) => each === wanted) && (await this.more()));
    const at = this.rows.findIndex(({ number: each }) => each === wanted);
    if (at >= 0) await this.show(at);
  }
}
