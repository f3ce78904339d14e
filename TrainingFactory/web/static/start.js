// Start: the config as a form generated from its schema, beside its YAML; the doctor; the start of the run.
import { get, job, post, url } from "./api.js";
import { debounce, h, put } from "./dom.js";
import { Field, same } from "./form.js";
import { counted } from "./format.js";
import { keys } from "./keys.js";
import {
  act,
  button,
  command,
  copyButton,
  empty,
  pairs,
  panel,
  searchField,
  segments,
  select,
  STARTING,
  timed,
  toast,
  waiting,
} from "./parts.js";
import { list as findings } from "./run_findings.js";

const TITLES = {
  lora: "LoRA",
  grpo: "GRPO",
  ppo: "PPO",
  dpo: "DPO",
  kto: "KTO",
  rft: "RFT",
  sft: "SFT",
  reward_model: "Reward model",
};
const titleOf = (name) => TITLES[name] ?? name[0].toUpperCase() + name.slice(1);

/** Moves the sections of algorithms behind `training`; only the chosen algorithm's section is shown. */
function ordered(sections) {
  const own = sections.filter(({ algorithm }) => algorithm);
  return sections
    .filter(({ algorithm }) => !algorithm)
    .flatMap((section) => (section.name === "training" ? [section, ...own] : [section]));
}

export async function show(place) {
  put(place.main, waiting());
  const [options, starts] = await Promise.all([
    get(url(["options"]), place.signal),
    get(url(["starts"]), place.signal),
  ]);
  const page = new StartPage(place, ordered(options.sections), starts);
  page.build();
  await page.begin(place.query);
}

class StartPage {
  constructor({ main, signal, setQuery }, sections, starts) {
    Object.assign(this, {
      main,
      signal,
      setQuery,
      sections,
      starts,
      given: {},
      problems: [],
      all: false,
      find: "",
      asked: 0,
    });
    this.fields = new Map();
    for (const { options } of sections)
      for (const option of options)
        this.fields.set(option.key, new Field(option, (key, value) => this.set(key, value)));
    this.check = debounce(200, () => this.ask({ options: this.given }));
  }

  build() {
    this.nav = h("nav", { class: "sections", "aria-label": "Sections of the config" });
    this.form = h("form", { class: "config", onsubmit: (event) => event.preventDefault() });
    const find = searchField(
      "Find an option",
      "",
      debounce(80, (text) => this.filter({ find: text.toLowerCase() })),
    );
    const levels = segments(
      "Options",
      [
        ["", "Common"],
        ["1", "All"],
      ],
      "",
      (all) => this.filter({ all: all === "1" }),
    );
    this.what = h("p", { class: "soft what" });
    put(
      this.main,
      h("header", { class: "head" }, h("h1", {}, "Start a run")),
      h("div", { class: "filters" }, this.sources(), h("span", { class: "gap" }), levels, find),
      this.what,
      h("div", { class: "start" }, this.nav, this.form, this.side()),
    );
    keys(this.signal, [["/", "Find an option", () => find.querySelector("input").focus()]]);
    this.drawForm();
  }

  /** The starting point: a template, an existing run, or an empty config. */
  sources() {
    const { templates, runs } = this.starts;
    const group = (label, kind, names) =>
      names.length > 0 &&
      h(
        "optgroup",
        { label },
        names.map((name) => h("option", { value: kind + ":" + name }, name)),
      );
    this.source = h(
      "select",
      { "aria-label": "Start from", id: "source", onchange: () => this.load(this.source.value) },
      h("option", { value: "empty:" }, "Empty config"),
      group(
        "Templates",
        "template",
        templates.map(({ name }) => name),
      ),
      group("Config of a run", "run", runs),
    );
    return h("label", { class: "source" }, "Start from ", this.source);
  }

  side() {
    this.yaml = h("textarea", {
      rows: 16,
      spellcheck: "false",
      "aria-label": "Config as YAML",
      id: "yaml",
      oninput: debounce(400, () => this.ask({ yaml: this.yaml.value }, true)),
    });
    this.told = h("div", { class: "told-config", role: "status" });
    this.name = h("input", {
      id: "run-name",
      placeholder: "generated from algorithm and time",
      autocomplete: "off",
    });
    this.wrongName = h("p", { class: "wrong", role: "alert" });
    this.starting = h("p", { class: "soft", role: "status" });
    this.doctor = h("div", {});
    this.go = button("Start the run", () => this.start(), { class: "main", id: "start" });
    this.examine = button("Run the doctor", () => this.diagnose(), { id: "doctor" });
    return h(
      "aside",
      { class: "side" },
      panel(
        "Config",
        [this.yaml, this.told],
        copyButton("Copy the config", () => this.yaml.value),
      ),
      panel(
        "Start",
        h(
          "div",
          { class: "go" },
          h("label", { for: "run-name" }, "Run name"),
          this.name,
          this.wrongName,
          h("div", { class: "buttons" }, this.examine, this.go),
          this.starting,
          h("p", { class: "soft" }, "Save the config as config.yaml to start the same run in a terminal:"),
          command("tfactory train config.yaml"),
          this.doctor,
        ),
      ),
    );
  }

  async begin(query) {
    const asked = query.get("from");
    const known = [...this.source.options].some(({ value }) => value === asked);
    const first = this.starts.templates.find(({ name }) => name === "tiny_grpo") ?? this.starts.templates[0];
    this.source.value = known ? asked : first ? "template:" + first.name : "empty:";
    await this.load(this.source.value);
  }

  async load(source) {
    const [kind, ...rest] = source.split(":");
    const name = rest.join(":");
    const template = this.starts.templates.find((each) => each.name === name);
    this.setQuery({ from: source });
    put(
      this.what,
      kind === "template"
        ? template.what + "."
        : kind === "run"
          ? "The config of run " + name + "."
          : "Every option has its default value.",
    );
    try {
      const yaml =
        kind === "template"
          ? template.yaml
          : kind === "run"
            ? (await get(url(["runs", name, "config"]), this.signal)).yaml
            : this.starts.empty;
      await this.ask({ yaml }, true);
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "error");
    }
  }

  set(key, value) {
    const { option } = this.fields.get(key);
    if (same(value, option.default)) delete this.given[key];
    else this.given[key] = value;
    this.fields.get(key).show(this.given[key]);
    this.go.disabled = true; // until the server has checked it
    this.check();
  }

  /** Has the server check the config; `read`: update the form with the result. */
  async ask(draft, read = false) {
    const asked = (this.asked += 1);
    try {
      const told = await post(url(["check"]), draft, this.signal);
      if (asked !== this.asked) return; // the input has changed since
      this.problems = told.problems;
      // A parsable config comes with all options and its YAML, even if it cannot start.
      const readable = Object.keys(told.options).length >= this.fields.size;
      if (read && readable) this.take(told.options);
      const stale = !readable && !told.yaml; // a form with invalid values has no YAML
      if (!stale && this.yaml !== document.activeElement) this.yaml.value = told.yaml;
      this.yaml.classList.toggle("stale", stale);
      this.drawTold(told, stale);
      this.filter({});
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "error");
    }
  }

  take(options) {
    this.given = {};
    for (const [key, field] of this.fields) {
      if (key in options && !same(options[key], field.option.default)) this.given[key] = options[key];
      field.show(this.given[key]);
    }
  }

  drawTold({ problems, notices }, stale) {
    this.go.disabled = problems.length > 0;
    this.examine.disabled = problems.length > 0;
    const verdict = problems.length
      ? h("p", { class: "wrong" }, counted(problems.length, "problem") + ":")
      : h("p", { class: "right" }, "The config is valid.");
    const lines = problems.map(({ key, message, line }) =>
      h(
        "li",
        {},
        h("a", { href: "#", onclick: (event) => this.jump(event, key) }, key || "config"),
        (line ? `, line ${line}` : "") + ": " + message,
      ),
    );
    put(
      this.told,
      verdict,
      lines.length > 0 && h("ul", {}, lines),
      stale && h("p", { class: "soft" }, "The YAML above is the last valid config."),
      notices.map((text) => h("p", { class: "notice" }, text)),
    );
  }

  jump(event, key) {
    event.preventDefault();
    this.fields.get(key)?.control.focus();
  }

  drawForm() {
    this.parts = this.sections.map(({ name, help, options, algorithm }) => {
      const element = h(
        "fieldset",
        { class: "panel", id: "section-" + name },
        h("legend", {}, titleOf(name)),
        h("p", { class: "soft" }, help),
        h(
          "div",
          { class: "fields" },
          options.map(({ key }) => this.fields.get(key).element),
        ),
      );
      const link = h(
        "a",
        {
          href: "#",
          onclick: (event) => {
            event.preventDefault();
            element.scrollIntoView({ block: "start", behavior: "smooth" });
          },
        },
        titleOf(name),
      );
      return { name, algorithm, options, element, link };
    });
    put(
      this.form,
      this.parts.map(({ element }) => element),
    );
    put(
      this.nav,
      this.parts.map(({ link }) => link),
    );
  }

  /** Shows the fields that are common, changed, invalid or searched for; of algorithms only the chosen one's. */
  filter(change) {
    Object.assign(this, change);
    const algorithm =
      this.given["training.algorithm"] ?? this.fields.get("training.algorithm")?.option.default;
    for (const part of this.parts) {
      let shown = 0;
      let wrong = 0;
      for (const { key, advanced } of part.options) {
        const field = this.fields.get(key);
        const own = this.problems.filter((each) => each.key === key || each.key.startsWith(key + "."));
        field.tell(own.map(({ message }) => message));
        const fits = this.find ? field.text.includes(this.find) : this.all || !advanced || key in this.given;
        field.element.hidden = !(fits || own.length);
        shown += !field.element.hidden;
        wrong += own.length;
      }
      const other = part.algorithm && part.name !== algorithm && !this.find && !wrong;
      part.element.hidden = !shown || other;
      part.link.hidden = part.element.hidden;
      part.link.classList.toggle("is-wrong", wrong > 0);
    }
  }

  async diagnose() {
    const heard = h("p", { class: "soft", role: "status" }, "Loading the model…");
    put(this.doctor, heard);
    await act(this.examine, async () => {
      try {
        const told = await job(
          url(["doctor"]),
          { yaml: this.yaml.value },
          ({ text }) => put(heard, text),
          this.signal,
        );
        put(
          this.doctor,
          h("h3", {}, "Doctor"),
          findings(told.findings),
          told.rows.length > 0 &&
            pairs(
              told.rows.map(([name, value]) => [
                name,
                typeof value === "object" ? JSON.stringify(value) : String(value),
              ]),
            ),
        );
      } catch (error) {
        put(this.doctor, empty("The doctor failed", error.message));
      }
    });
  }

  async start() {
    put(this.wrongName);
    await act(this.go, async () => {
      try {
        const body = { yaml: this.yaml.value, name: this.name.value.trim() || null };
        const started = await timed(this.starting, STARTING, () => post(url(["train"]), body, this.signal));
        location.hash = "#/run/" + encodeURIComponent(started.name);
        toast("Started " + started.name + ". The run continues when you close this page.", "good");
      } catch (error) {
        if (error.param !== "name") throw error;
        put(this.wrongName, error.message);
        this.name.focus();
      }
    });
  }
}
