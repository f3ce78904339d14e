// The choice of a reward and its options, as the config's section `reward`.
import { h, put } from "./dom.js";
import { number } from "./format.js";

const KINDS = [
  [
    "environment",
    "The exact answer",
    "1 if the model's last message is exactly the task's answer, else 0.",
  ],
  [
    "rule_based",
    "A rule",
    "Extracts the answer from the last message and compares it: as a number, as text ignoring case and quotes, as JSON, and so on.",
  ],
  ["tool_verified", "Execution", "Executes the answer, a query or code, and compares its result."],
  ["model_judge", "A judge", "Another model reads the episode and gives a score."],
];
const WHERE = [
  ["", "default of the rule"],
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
    "The same number if the reference is a number, else the same text ignoring case, spaces and quotes.",
  ],
  ["exact", "Exactly the same text."],
  ["normalised", "The same text ignoring case, spaces, quotes, emphasis and a full stop."],
  ["numeric", "The same number; the answer must state exactly one."],
  ["choice", "The letter of the right choice, or its text."],
  ["contains", "The model's answer contains the reference as whole words."],
  ["em", "Exact match as in SQuAD: ignores case, punctuation and articles."],
  ["f1", "Word overlap (F1), from 0 to 1."],
  ["math", "Mathematically equal, in any notation."],
  ["json", "The same JSON value."],
  ["schema", "JSON that matches a schema; needs no reference answer."],
  ["regex", "The answer matches a pattern."],
  ["format", "The whole last message matches a pattern; needs no reference answer."],
  ["length", "Short enough; needs no reference answer."],
  ["code_tests", "Code that passes the task's tests, run with the python tool."],
  ["sql_result", "A query with the same rows as the reference query, run with the sql tool."],
];
const VERIFIERS = [
  ["sql_execution", "Runs a query with the sql tool; it must return the rows of the reference query."],
  ["code_cases", "Calls a function with the task's test cases, using the python tool."],
  ["code_tests", "Runs code against the task's tests, using the python tool."],
  ["calculated", "Compares with the calculator's result for the task's expression, or with the task's answer."],
];
// Further options of a rule: name, label, kind.
const NUMBER = [
  ["tolerance", "Absolute tolerance", "number"],
  ["relative", "Relative tolerance", "number"],
];
const MORE = {
  auto: NUMBER,
  numeric: NUMBER,
  calculated: NUMBER,
  regex: [
    ["pattern", "Pattern (empty: the task's answer)", "text"],
    ["full", "The whole answer must match", "switch"],
  ],
  format: [["pattern", "Pattern of the whole message", "text"]],
  length: [
    ["soft", "Full reward up to", "number"],
    ["hard", "No reward from", "number"],
    ["unit", "Counted in", ["tokens", "turns", "words", "characters"]],
  ],
  schema: [["schema", "JSON schema", "json"]],
  json: [["partial", "Reward the share of right keys", "switch"]],
  code_cases: [
    ["entry", "Function name", "text"],
    ["partial", "Reward the share of cases", "switch"],
  ],
  code_tests: [["partial", "Reward the share of tests", "switch"]],
};
const NO_EXTRACT = ["length", "format"];
const JUDGE = [
  ["base_url", "Base URL of the API", "text", "http://localhost:8000/v1"],
  ["model", "Model name", "text", "QwQ-32B"],
  ["api_key_env", "Environment variable with the API key", "text", "none"],
  ["rubric", "Rubric", "long", "default: is the answer right and complete?"],
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
    if (type === "tool_verified") this.list(VERIFIERS, "Verifier", "verify");
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

  /** Returns the config's options; empty fields keep their defaults. */
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
    options.api_key_env = options.api_key_env ?? null; // most self-hosted judges have no key
    return {
      "reward.type": this.type,
      "reward.options": options,
      ...(model ? { "reward.model": model } : {}),
    };
  }

  /** Returns the missing inputs as texts, in addition to the server's check. */
  problems(tasks) {
    const lacking = [];
    const unanswered = tasks ? tasks.count - tasks.answered : 0;
    if (this.type === "environment" && unanswered)
      lacking.push(
        `${number(unanswered)} of the tasks have no reference answer; add answers, or choose a rule or a judge.`,
      );
    if (this.type === "model_judge")
      for (const { key, input } of this.controls)
        if (["base_url", "model"].includes(key) && !input.value.trim())
          lacking.push("The judge needs a " + (key === "model" ? "model name." : "base URL."));
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
    return text; // the server reports the problem
  }
}
