// A form field for one option of the config: a control by its kind, its help, its range and its problems.
import { h, put } from "./dom.js";
import { plain } from "./format.js";
import { iconButton } from "./parts.js";

// Labels where the last part of the key is not a common name.
const NAMES = {
  kl: "KL",
  r: "Rank",
  "num epochs": "Epochs",
  "environment id": "Environment",
  "eval every": "Evaluate every",
};

/** Returns whether two option values are equal. */
export function same(a, b) {
  return JSON.stringify(a ?? null) === JSON.stringify(b ?? null);
}

export class Field {
  /** `changed(key, value)` is called on every input. */
  constructor(option, changed) {
    Object.assign(this, { option, changed, id: "option-" + option.key.replaceAll(".", "-") });
    this.control = this.make();
    this.wrong = h("p", { class: "wrong", id: this.id + "-wrong", role: "alert" });
    const reset = iconButton("close", "Reset to default", () => this.back());
    const name = option.key.split(".").slice(1).join(".") || option.key;
    const words = name.replaceAll("_", " ");
    const label = h("label", { for: this.id, title: option.key }, NAMES[words] ?? words);
    const help = h("p", { class: "help", id: this.id + "-help" }, option.help, this.range());
    this.control.setAttribute("aria-describedby", help.id + " " + this.wrong.id);
    this.element = h(
      "div",
      { class: "field kind-" + option.kind, "data-key": option.key },
      label,
      h("div", { class: "control" }, this.control, this.known, reset),
      this.wrong,
      help,
    );
  }

  get text() {
    return (this.option.key + " " + this.option.help).toLowerCase().replaceAll("_", " ");
  }

  range() {
    const { least, most, above, kind } = this.option;
    if (kind !== "number" && kind !== "integer") return null;
    const parts = [
      least !== null && least !== undefined && (above ? "> " : "≥ ") + least,
      most !== null && most !== undefined && "≤ " + most,
    ].filter(Boolean);
    return parts.length > 0 && h("small", { class: "limits" }, parts.join(", "));
  }

  make() {
    const { kind, choices, nullable, default: usual } = this.option;
    const tell = () => this.changed(this.option.key, this.read());
    if (kind === "switch" && !nullable) return h("input", { type: "checkbox", id: this.id, onchange: tell });
    if (kind === "switch" || kind === "choice") {
      const values = kind === "switch" ? ["true", "false"] : choices;
      return h(
        "select",
        { id: this.id, onchange: tell },
        nullable && h("option", { value: "" }, "not set"),
        values.map((value) => h("option", { value }, value)),
      );
    }
    if (kind === "list" || kind === "map") {
      const example = kind === "list" ? '["search"]' : '{"name": 1}';
      return h("textarea", {
        id: this.id,
        rows: 2,
        spellcheck: "false",
        placeholder: "JSON, such as " + example,
        oninput: tell,
      });
    }
    const list =
      choices &&
      h(
        "datalist",
        { id: this.id + "-known" },
        choices.map((value) => h("option", { value })),
      );
    this.known = list;
    return h("input", {
      id: this.id,
      autocomplete: "off",
      spellcheck: "false",
      inputmode: kind === "text" ? null : "decimal",
      list: list && list.id,
      placeholder: usual === null ? "not set" : plain(usual),
      oninput: tell,
    });
  }

  /** Returns the value for the config; an invalid one stays text, and the server's check reports it. */
  read() {
    const { kind, nullable, default: usual } = this.option;
    if (this.control.type === "checkbox") return this.control.checked;
    const text = this.control.value.trim();
    if (text === "") return nullable && kind !== "text" ? null : usual;
    if (kind === "switch") return text === "true";
    if (kind === "number" || kind === "integer") return Number.isFinite(Number(text)) ? Number(text) : text;
    if (kind !== "list" && kind !== "map") return this.control.value;
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }

  /** Shows a value; undefined is the default. */
  show(value) {
    const { kind, default: usual } = this.option;
    const given = value === undefined ? usual : value;
    this.element.classList.toggle("changed", value !== undefined);
    if (this.control === document.activeElement) return;
    if (this.control.type === "checkbox") this.control.checked = given === true;
    else if (this.control.tagName === "SELECT") this.control.value = given === null ? "" : String(given);
    else if (value === undefined) this.control.value = "";
    else
      this.control.value =
        given === null
          ? ""
          : kind === "list" || kind === "map"
            ? JSON.stringify(given, null, 1)
            : String(given);
  }

  back() {
    this.control.blur();
    this.changed(this.option.key, this.option.default);
  }

  tell(messages) {
    put(this.wrong, messages.join("; "));
    this.element.classList.toggle("is-wrong", messages.length > 0);
    this.control.setAttribute("aria-invalid", String(messages.length > 0));
  }
}
