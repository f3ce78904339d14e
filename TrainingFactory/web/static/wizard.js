// Wizard: from pasted servers and tasks to a run. Commands start only after they were shown and confirmed.
import { get, job, post, url } from "./api.js";
import { debounce, h, put, scroller, visible } from "./dom.js";
import { counted, number, plain } from "./format.js";
import { icon } from "./icons.js";
import { act, button, command, panel, STARTING, table, timed, toast, waiting } from "./parts.js";
import { rewards } from "./episode.js";
import { conversation, messages } from "./turns.js";
import { RewardChoice } from "./wizard_reward.js";
import { ToolsStep } from "./wizard_tools.js";

const TASKS =
  '{"prompt": "How many files are here?", "answer": "3"}\n\nor CSV with the columns prompt and answer, or one question per line, with its answer after a tab';
// Key of the config, its label as on the page Start, a value for a first run, and its help.
const LENGTHS = [
  ["training.max_steps", "Max steps", 20, "Training steps. Each updates the model once."],
  ["training.batch_size", "Batch size", 4, "Tasks per step."],
  ["training.group_size", "Group size", 4, "Episodes per task, whose rewards are compared. At least 2."],
  ["environment.max_turns", "Max turns", 6, "Turns after which an episode ends."],
  ["sampling.max_tokens", "Max tokens", 256, "Length at which a turn is truncated."],
  ["training.learning_rate", "Learning rate", 0.00001, "Step size of the optimizer."],
];
// Problems of the server's check that the wizard reports as missing tasks.
const NO_TASKS = ["environment.environment_id", "data.tasks"];

export async function show(place) {
  put(place.main, waiting());
  const { models } = await get(url(["play"]), place.signal);
  new Wizard(place, models).build();
}

class Wizard {
  constructor({ main, signal }, models) {
    Object.assign(this, { main, signal, models, tasks: null, asked: 0 });
    this.reward = new RewardChoice(() => this.changed());
    this.tools = new ToolsStep({
      signal,
      mark: (text, done) => this.mark("tools", text, done),
      changed: () => this.changed(),
    });
    this.later = debounce(150, () => this.check());
  }

  /** Schedules a check of the form's config. */
  changed() {
    for (const each of [this.play, this.go]) each.disabled = true;
    this.later();
  }

  build() {
    const steps = [
      ["tools", "Tools", this.tools.element],
      ["tasks", "Tasks", this.tasksStep()],
      ["reward", "Reward", this.reward.element],
      ["model", "Model and length", this.modelStep()],
      ["samples", "Two sample episodes", this.samplesStep()],
      ["train", "Train", this.trainStep()],
    ];
    this.marks = new Map();
    const panels = steps.map(([key, title, content], at) => {
      const mark = h("span", { class: "mark", "aria-hidden": "true" }, at + 1);
      const told = h("span", { class: "soft" });
      this.marks.set(key, { mark, told, at });
      return h(
        "section",
        { class: "panel step", id: "step-" + key, "aria-label": title },
        h("header", {}, mark, h("h2", {}, title), told),
        h("div", { class: "inside" }, content),
      );
    });
    put(
      this.main,
      h(
        "header",
        { class: "head" },
        h("h1", {}, "Wizard"),
        h("p", { class: "soft" }, "Set up a run from tools and tasks in six steps."),
      ),
      h("div", { class: "wizard" }, h("div", { class: "steps-of" }, panels), this.side()),
    );
    this.mark("tools", "none: the model answers without tools");
    this.check();
  }

  /** Marks a step as done or open, with a short result. */
  mark(step, text, done = false) {
    const { mark, told, at } = this.marks.get(step);
    put(mark, done ? icon("check", 14) : at + 1);
    mark.classList.toggle("is-done", done);
    put(told, text);
  }

  tasksStep() {
    this.pasted = h("textarea", {
      rows: 7,
      spellcheck: "false",
      id: "tasks",
      "aria-label": "Tasks",
      placeholder: TASKS,
      oninput: debounce(350, () => this.readTasks(this.pasted.value)),
    });
    const file = h("input", {
      type: "file",
      class: "hidden-file",
      id: "task-file",
      accept: ".jsonl,.json,.csv,.txt,.tsv",
      onchange: async () => {
        if (!file.files[0]) return;
        this.pasted.value = await file.files[0].text();
        await this.readTasks(this.pasted.value);
      },
    });
    this.found = h("div", { class: "shown", role: "status" });
    return [
      h(
        "p",
        { class: "soft" },
        "Questions with their reference answers: JSONL, JSON, CSV, or one question per line.",
      ),
      this.pasted,
      h(
        "div",
        { class: "buttons" },
        file,
        h("label", { for: "task-file", class: "button" }, "Choose a file"),
      ),
      this.found,
    ];
  }

  async readTasks(text) {
    this.tasks = null;
    if (!text.trim()) {
      put(this.found);
      this.mark("tasks", "");
      return this.changed();
    }
    try {
      const told = await post(url(["tasks", "read"]), { text }, this.signal);
      if (this.pasted.value !== text) return undefined;
      this.tasks = told.problem ? null : told;
      this.mark("tasks", told.problem ? "" : `${counted(told.count, "task")}, ${told.kind}`, !told.problem);
      put(
        this.found,
        told.problem ? h("pre", { class: "wrong", role: "alert" }, visible(told.problem)) : tasksOf(told),
      );
    } catch (error) {
      if (error.name !== "AbortError")
        put(this.found, h("p", { class: "wrong", role: "alert" }, error.message));
    }
    return this.changed();
  }

  // model and length

  modelStep() {
    const names = this.models.map(({ name }) => h("option", { value: name }));
    this.model = h("input", {
      id: "model",
      value: "builtin:tiny",
      list: "known-models",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.changed(),
    });
    this.lora = h("input", { type: "checkbox", id: "lora", onchange: () => this.changed() });
    this.prompt = h("textarea", {
      id: "system-prompt",
      rows: 3,
      placeholder: "Use the tools, then answer with the result alone.",
      oninput: () => this.changed(),
    });
    this.numbers = LENGTHS.map(([key, label, usual, help]) => {
      const input = h("input", {
        id: "wizard-" + key.replace(".", "-"),
        inputmode: "decimal",
        autocomplete: "off",
        value: String(usual),
        oninput: () => this.changed(),
      });
      return { key, input, element: field(input, label, help) };
    });
    return [
      h("datalist", { id: "known-models" }, names),
      h(
        "div",
        { class: "fields" },
        field(
          this.model,
          "Model",
          "A built-in or registered model, a run, a folder, or a Hugging Face name.",
        ),
        field(this.lora, "LoRA", "Train an adapter and keep the model's weights fixed. Needs less memory."),
        field(this.prompt, "System prompt", "First message of every conversation. Empty: no system prompt."),
        this.numbers.map(({ element }) => element),
      ),
    ];
  }

  // the config

  options() {
    const made = { "model.name": this.model.value.trim(), "training.algorithm": "grpo" };
    for (const { key, input } of this.numbers)
      made[key] =
        Number.isFinite(Number(input.value)) && input.value.trim() ? Number(input.value) : input.value;
    if (this.lora.checked) made["lora.enabled"] = true;
    if (this.prompt.value.trim()) made["environment.system_prompt"] = this.prompt.value.trim();
    if (this.tools.tools.length) made.tools = this.tools.tools;
    if (this.tasks) made["data.tasks"] = this.tasks.path;
    return Object.assign(made, this.reward.options());
  }

  side() {
    this.yaml = scroller(h("pre", { class: "yaml", id: "wizard-yaml" }));
    this.told = h("div", { class: "told-config", role: "status" });
    this.link = h("a", { class: "button small", download: "train.yaml", id: "download" }, "Download");
    return h("aside", { class: "side" }, panel("Config", [this.yaml, this.told], this.link));
  }

  async check() {
    const asked = (this.asked += 1);
    try {
      const told = await post(url(["check"]), { options: this.options() }, this.signal);
      if (asked !== this.asked) return;
      const problems = [
        ...this.reward.problems(this.tasks),
        ...told.problems
          .filter(({ key }) => this.tasks || !NO_TASKS.includes(key))
          .map(({ key, message }) => (key ? key + ": " : "") + message),
      ];
      if (!this.tasks) problems.unshift("Add tasks in step 2.");
      this.config = told.yaml || null; // an invalid config has no text
      this.draw(problems, told.notices);
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "error");
    }
  }

  draw(problems, notices) {
    const wrong = problems.length > 0;
    if (this.config !== null) put(this.yaml, this.config);
    this.link.href = "data:text/yaml;charset=utf-8," + encodeURIComponent(this.config ?? "");
    this.mark("reward", this.reward.title, !this.reward.problems(this.tasks).length);
    this.mark("model", this.model.value, Boolean(this.model.value.trim()));
    put(
      this.told,
      wrong
        ? h(
            "ul",
            {},
            problems.map((each) => h("li", { class: "wrong" }, visible(each))),
          )
        : h("p", { class: "right" }, "The config is valid; tfactory train accepts it."),
      notices.map((text) => h("p", { class: "notice" }, text)),
      h(
        "p",
        { class: "soft" },
        "All other options have their defaults; see the page ",
        h("a", { href: "#/start" }, "Start"),
        ".",
      ),
    );
    for (const each of [this.play, this.go]) each.disabled = wrong;
  }

  // samples and start

  samplesStep() {
    this.play = button("Play two episodes", () => this.samples(), { id: "sample", disabled: true });
    this.played = h("div", { class: "shown" });
    return [
      h(
        "p",
        { class: "soft" },
        "The untrained model tries the first two tasks, so that you can check tools, tasks and reward. Nothing is saved.",
      ),
      h("div", { class: "buttons" }, this.play),
      this.played,
    ];
  }

  async samples() {
    const heard = h("p", { class: "soft", role: "status" }, "Loading the model…");
    put(this.played, heard);
    await act(this.play, async () => {
      try {
        const told = await job(
          url(["sample"]),
          { yaml: this.config },
          ({ text }) => put(heard, text),
          this.signal,
        );
        const scored = told.episodes.filter(({ row }) => row.reward !== null).length;
        this.mark("samples", `${counted(told.episodes.length, "episode")}, ${scored} scored`, scored > 0);
        put(
          this.played,
          told.notes.map((text) => h("p", { class: "soft note" }, text)),
          scroller(h("div", { class: "members" }, told.episodes.map(sampleOf))),
        );
      } catch (error) {
        if (error.name !== "AbortError")
          put(this.played, h("p", { class: "why", role: "alert" }, visible(error.message)));
      }
    });
  }

  trainStep() {
    this.name = h("input", {
      id: "wizard-name",
      placeholder: "generated from algorithm and time",
      autocomplete: "off",
    });
    this.wrongName = h("p", { class: "wrong", role: "alert" });
    this.starting = h("p", { class: "soft", role: "status" });
    this.go = button("Train", () => this.train(), { class: "main", id: "train", disabled: true });
    return [
      h(
        "div",
        { class: "buttons" },
        h("label", { for: "wizard-name" }, "Run name"),
        this.name,
        this.go,
      ),
      this.wrongName,
      this.starting,
      h(
        "p",
        { class: "soft" },
        "The run is a separate process and continues when you close this page. In a terminal, with the downloaded file:",
      ),
      command("tfactory train train.yaml"),
    ];
  }

  async train() {
    put(this.wrongName);
    await act(this.go, async () => {
      try {
        const body = { yaml: this.config, name: this.name.value.trim() || null };
        const started = await timed(this.starting, STARTING, () => post(url(["train"]), body, this.signal));
        location.hash = "#/run/" + encodeURIComponent(started.name);
        toast("Started " + started.name + ". The run continues when you close this page.", "good");
      } catch (error) {
        if (error.name !== "AbortError") put(this.wrongName, visible(error.message));
      }
    });
  }
}

function field(input, label, help) {
  const named = h("label", { for: input.id }, label);
  return h(
    "div",
    { class: "field" },
    named,
    h("div", { class: "control" }, input),
    h("p", { class: "help" }, help),
  );
}

function tasksOf({ count, answered, first }) {
  const rows = first.map(({ id, prompt, answer }) => [
    h("code", {}, visible(id)),
    h("span", { class: "clip" }, visible(typeof prompt === "string" ? prompt : prompt.at(-1).content)),
    answer === null
      ? h("span", { class: "soft" }, "none")
      : h("span", { class: "clip" }, visible(plain(answer))),
  ]);
  return [
    table("First tasks", ["Task", "Prompt", "Answer"], rows),
    h(
      "p",
      { class: "soft" },
      `${counted(count, "task")}, ${number(answered)} with a reference answer.`,
    ),
  ];
}

function sampleOf(view) {
  const { row } = view;
  return h(
    "section",
    { class: "member", "aria-label": "Episode of " + row.task },
    h(
      "header",
      {},
      h("b", {}, visible(row.task)),
      h("span", { class: "status status-" + row.status }, row.status.replace("_", " ")),
      h("b", { class: "num score" }, number(row.reward)),
    ),
    row.error && h("p", { class: "why" }, visible(row.error)),
    rewards(view),
    messages(view.prompt),
    conversation(view, null, "text"),
  );
}
