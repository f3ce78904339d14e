// Who scores an episode, in plain words, with what it needs; as the config's section `reward`.
import { h, put } from "./dom.js";
import { number } from "./format.js";

const KINDS = [
  [
    "environment",
    "The exact answer",
    "1 if the model's last message is the task's answer and nothing else, 0 if not.",
  ],
  [
    "rule_based",
    "A rule",
    "The answer is taken out of the last message and compared: as a number, apart from case and quotes, as JSON, and so on.",
  ],
  ["tool_verified", "By running it", "The answer is run, a query or code, and what comes of it is compared."],
  ["model_judge", "A judge", "Another model reads the episode and gives a score."],
];
const WHERE = [
  ["", "as the rule takes it"],
  ["whole", "the whole last message"],
  ["last_line", "its last line"],
  ["last_number", "its last number"],
  ["boxed", "inside \\boxed{}"],
  ["marker", "after ####"],
  ["tag", "between <answer> tags"],
];
const RULES = [
  [
    "auto",
    "The same number where the right answer is one, else the same text apart from case, spaces and quotes.",
  ],
  ["exact", "The same text, letter by letter."],
  ["normalised", "The same text apart from case, spaces, quotes, emphasis and a full stop."],
  ["numeric", "The same number; the answer must state exactly one."],
  ["choice", "The letter of the right choice, or its text."],
  ["contains", "The right answer occurs in the given one, as whole words."],
  ["em", "Exact match as for SQuAD: case, punctuation and articles do not count."],
  ["f1", "How far the words are the same, from 0 to 1."],
  ["math", "The same mathematical object, however it is written."],
  ["json", "The same JSON value."],
  ["schema", "JSON that fits a schema; no answer is needed."],
  ["regex", "The answer matches a pattern."],
  ["format", "The whole last message matches a pattern; no answer is needed."],
  ["length", "Short enough; no answer is needed."],
  ["code_tests", "Code that passes the task's tests, run with the tool python."],
  ["sql_result", "A query that gives the rows of the right one, run with the tool sql."],
];
const VERIFIERS = [
  ["sql_execution", "A query is run with the tool sql: it must give the rows of the right one."],
  ["code_cases", "A function is called with the task's cases by the tool python."],
  ["code_tests", "Code is run against the task's tests by the tool python."],
  ["calculated", "The calculator's result for the task's expression, or the task's answer."],
];
// What a rule needs or takes besides: name, label, kind.
const NUMBER = [
  ["tolerance", "May differ by", "number"],
  ["relative", "or by this share", "number"],
];
const MORE = {
  auto: NUMBER,
  numeric: NUMBER,
  calculated: NUMBER,
  regex: [
    ["pattern", "Pattern (empty: the task's answer)", "text"],
    ["full", "The whole answer must match", "switch"],
  ],
  format: [["pattern", "Pattern of the whole text", "text"]],
  length: [
    ["soft", "Full reward up to", "number"],
    ["hard", "None from", "number"],
    ["unit", "Counted in", ["tokens", "turns", "words", "characters"]],
  ],
  schema: [["schema", "JSON schema", "json"]],
  json: [["partial", "Reward the share of keys that are right", "switch"]],
  code_cases: [
    ["entry", "Name of the function", "text"],
    ["partial", "Reward the share of cases", "switch"],
  ],
  code_tests: [["partial", "Reward the share of tests", "switch"]],
};
const NO_EXTRACT = ["length", "format"];
const JUDGE = [
  ["base_url", "Address of its API", "text", "http://localhost:8000/v1"],
  ["model", "Its name there", "text", "QwQ-32B"],
  ["api_key_env", "Variable with the key", "text", "none"],
  ["rubric", "What it shall look at", "long", "as usual: is the answer right and complete?"],
];

export class RewardChoice {
  constructor(changed) {
    Object.assign(this, { changed, type: "environment", controls: [] });
    this.more = h("div", { class: "fields" });
    const cards = KINDS.map(([type, title, what]) => {
      const input = h("input", {
        type: "radio",
        name: "reward",
        value: type,
        checked: type === this.type,
        onchange: () => this.choose(type),
      });
      return h("label", { class: "choice" }, input, h("span", {}, h("b", {}, title), h("small", {}, what)));
    });
    this.element = [
      h("div", { class: "choices", role: "radiogroup", "aria-label": "Reward" }, cards),
      this.more,
    ];
  }

  get title() {
    const name = this.named?.value;
    return KINDS.find(([type]) => type === this.type)[1].toLowerCase() + (name ? ": " + name : "");
  }

  choose(type) {
    this.type = type;
    this.named = null;
    this.controls = [];
    put(this.more);
    if (type === "model_judge") this.draw(JUDGE);
    if (type === "rule_based") this.list(RULES, "Rule", "rule");
    if (type === "tool_verified") this.list(VERIFIERS, "What is run", "verify");
    this.changed();
  }

  list(all, label, key) {
    const what = h("p", { class: "help" });
    const rest = h("div", { class: "fields rest" });
    this.named = h(
      "select",
      { id: "reward-" + key, onchange: () => draw() },
      all.map(([name]) => h("option", { value: name }, name)),
    );
    const draw = () => {
      const [name, text] = all.find(([each]) => each === this.named.value);
      put(what, text);
      this.controls = [];
      put(rest);
      if (!NO_EXTRACT.includes(name)) this.draw([["extract", "The answer is", WHERE]], rest);
      this.draw(MORE[name] ?? [], rest);
      this.changed();
    };
    put(
      this.more,
      h(
        "div",
        { class: "field" },
        h("label", { for: this.named.id }, label),
        h("div", { class: "control" }, this.named),
        what,
      ),
      rest,
    );
    draw();
  }

  draw(fields, place = this.more) {
    for (const [key, label, kind, usual] of fields) {
      const id = "reward-option-" + key;
      const tell = () => this.changed();
      const input = Array.isArray(kind)
        ? h(
            "select",
            { id, onchange: tell },
            kind.map((each) =>
              h(
                "option",
                { value: Array.isArray(each) ? each[0] : each },
                Array.isArray(each) ? each[1] : each,
              ),
            ),
          )
        : kind === "switch"
          ? h("input", { id, type: "checkbox", onchange: tell })
          : kind === "long" || kind === "json"
            ? h("textarea", { id, rows: 2, placeholder: usual ?? '{"type": "object"}', oninput: tell })
            : h("input", {
                id,
                placeholder: usual ?? "not set",
                inputmode: kind === "number" ? "decimal" : null,
                autocomplete: "off",
                oninput: tell,
              });
      this.controls.push({ key, kind, input });
      place.append(
        h("div", { class: "field" }, h("label", { for: id }, label), h("div", { class: "control" }, input)),
      );
    }
  }

  /** The keys of the config; what is empty is left to its default. */
  options() {
    const made = {};
    for (const { key, kind, input } of this.controls) {
      if (kind === "switch") {
        if (input.checked) made[key] = true;
        continue;
      }
      const text = input.value.trim();
      if (text === "") continue;
      made[key] =
        kind === "number" && Number.isFinite(Number(text))
          ? Number(text)
          : kind === "json"
            ? parsed(text)
            : text;
    }
    if (this.type === "environment") return {};
    if (this.named) made[this.type === "rule_based" ? "rule" : "verify"] = this.named.value;
    const { model, ...options } = made;
    if (this.type !== "model_judge") return { "reward.type": this.type, "reward.options": made };
    options.api_key_env = options.api_key_env ?? null; // most judges of one's own have no key
    return {
      "reward.type": this.type,
      "reward.options": options,
      ...(model ? { "reward.model": model } : {}),
    };
  }

  /** What is missing, in words; the server's own check comes on top. */
  problems(tasks) {
    const lacking = [];
    const unanswered = tasks ? tasks.count - tasks.answered : 0;
    if (this.type === "environment" && unanswered)
      lacking.push(
        `${number(unanswered)} of the tasks have no answer to compare with; choose a rule, a judge, or give answers.`,
      );
    if (this.type === "model_judge")
      for (const { key, input } of this.controls)
        if (["base_url", "model"].includes(key) && !input.value.trim())
          lacking.push("The judge needs " + (key === "model" ? "a name." : "an address."));
    if (this.named?.value === "length")
      for (const { key, input } of this.controls)
        if (["soft", "hard"].includes(key) && !input.value.trim())
          lacking.push(
            `The rule length needs a number for ${key === "soft" ? "the full reward" : "no reward"}.`,
          );
    return lacking;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text; // the server says what is wrong with it
  }
}
