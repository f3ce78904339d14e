// The elements of the page Play: model and environment, conversation, composer, sampling, and saving.
import { h, put } from "./dom.js";
import { keys } from "./keys.js";
import { button, panel } from "./parts.js";

/** The elements; what they do is in play.js. */
export class PlayFrame {
  constructor({ main, signal, query, setQuery }, choices) {
    Object.assign(this, {
      main,
      signal,
      query,
      setQuery,
      choices,
      opened: null,
      entries: [],
      other: null,
      busy: false,
      writing: false,
      notes: [],
    });
    signal.addEventListener("abort", () => this.stop()); // leaving the page stops the answer; the model stays loaded
  }

  build() {
    const { models, environments } = this.choices;
    const group = (label, list) =>
      list.length > 0 &&
      h(
        "optgroup",
        { label },
        list.map(({ name, what }) => h("option", { value: name }, name, what ? ` (${what})` : "")),
      );
    const of = (prefix) => models.filter(({ what }) => what.startsWith(prefix));
    this.model = h(
      "select",
      { id: "play-model", onchange: () => this.home() },
      group("Runs and their checkpoints", of("run")),
      group("Registered", of("registered")),
      group("Built in", of("built in")),
      group("Endpoints", of("endpoint")),
    );
    this.environment = h(
      "select",
      { id: "play-environment" },
      h("option", { value: "" }, "None: a plain conversation"),
      h(
        "optgroup",
        { label: "Environments" },
        environments
          .filter(({ name }) => name.startsWith("environment:"))
          .map(({ name, what }) => h("option", { value: name }, what)),
      ),
      h(
        "optgroup",
        { label: "As in a run" },
        environments
          .filter(({ name }) => name.startsWith("run:"))
          .map(({ name, what }) => h("option", { value: name }, what)),
      ),
    );
    this.task = h(
      "select",
      { id: "play-task", disabled: true, onchange: () => this.begin(this.task.value || null) },
      h("option", { value: "" }, "my own message"),
    );
    this.start = button("Begin", () => this.begin(), { class: "main", id: "begin" });
    const asked = this.query.get("model");
    if ([...this.model.options].some(({ value }) => value === asked)) this.model.value = asked;
    this.home();
    if (this.query.get("environment") !== null) this.environment.value = this.query.get("environment");
    this.talk = h("div", { class: "talk", "aria-live": "off" });
    this.told = h("div", { class: "notes", role: "status" });
    this.pair = h("div", {});
    this.chat = h(
      "section",
      { class: "chat", "aria-label": "Conversation" },
      this.talk,
      this.pair,
      this.told,
      this.composer(),
    );
    put(
      this.main,
      h("header", { class: "head" }, h("h1", {}, "Play")),
      h(
        "div",
        { class: "chooser" },
        h("label", {}, "Model", this.model),
        h("label", {}, "Environment", this.environment),
        h("label", {}, "Begin with", this.task),
        this.start,
      ),
      h("div", { class: "play" }, this.chat, this.side()),
    );
    keys(this.signal, [
      ["i", "Write", () => this.input.focus()],
      ["x", "Stop the answer", () => this.stop()],
      ["a", "Another answer", () => this.another()],
    ]);
    this.draw();
  }

  /** Chooses the environment in which a run's model was trained. An endpoint keeps the chosen one. */
  home() {
    const model = this.choices.models.find(({ name }) => name === this.model.value);
    if (!model?.what.startsWith("endpoint")) this.environment.value = model?.environment ?? "";
  }

  composer() {
    this.input = h("textarea", {
      id: "say",
      rows: 2,
      "aria-label": "Your message",
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        this.send();
      },
    });
    this.sendButton = button("Send", () => this.send(), { class: "main", id: "send" });
    this.stopButton = button("Stop", () => this.stop(), {
      id: "stop-answer",
      iconName: "stop",
      hidden: true,
    });
    this.state = h("span", { class: "soft", role: "status" });
    return h(
      "div",
      { class: "composer" },
      this.input,
      h("div", { class: "buttons" }, this.state, this.stopButton, this.sendButton),
    );
  }

  side() {
    const setting = (id, label, value, more = {}) => {
      const input = h("input", {
        id,
        inputmode: "decimal",
        value: String(value),
        autocomplete: "off",
        ...more,
      });
      return [h("label", { for: id }, label), input];
    };
    const rows = [
      setting("temperature", "Temperature", 1),
      setting("max-tokens", "Max tokens", 256),
      setting("seed", "Seed", 0),
    ];
    [this.temperature, this.maxTokens, this.seed] = rows.map(([, input]) => input);
    this.settings = { temperature: rows[0], "max tokens": rows[1], seed: rows[2] };
    this.about = h("div", { class: "keep" });
    this.aboutPanel = panel("Endpoint", this.about);
    this.toolList = h(
      "div",
      {},
      h("p", { class: "soft" }, "The environment's tools are listed once the conversation has begun."),
    );
    this.dataset = h("input", { id: "dataset", value: "play", autocomplete: "off", spellcheck: "false" });
    this.keepButtons = [
      ["Demonstration", "demonstration", {}],
      ["Good", "verdict", { good: true }],
      ["Bad", "verdict", { good: false }],
    ].map(([label, kind, more]) =>
      button(label, (event) => this.keep(event.currentTarget, { kind, ...more }), {
        id: "keep-" + label.toLowerCase(),
        disabled: true,
      }),
    );
    this.kept = h("div", { class: "commands" });
    const keep = h(
      "div",
      { class: "keep" },
      h("label", { for: "dataset" }, "Dataset"),
      this.dataset,
      h(
        "p",
        { class: "soft" },
        "Demonstration: train on the conversation (SFT). Good and bad: label the conversation (KTO). For a preference (DPO), request another answer and pick the better one.",
      ),
      h("div", { class: "buttons" }, this.keepButtons),
      this.kept,
    );
    return h(
      "aside",
      { class: "side" },
      panel("Sampling", h("div", { class: "settings" }, rows)),
      this.aboutPanel,
      panel("Save the conversation", keep),
      panel("Tools", this.toolList),
    );
  }
}
