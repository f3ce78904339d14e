// A promotion: choice of suite and alias, progress of the gate, and its verdict.
import { get, job, url, where } from "./api.js";
import { h, put } from "./dom.js";
import { number } from "./format.js";
import { icon } from "./icons.js";
import { command, dialog, empty, panel, toast } from "./parts.js";

/** Asks for suite and alias, and shows the progress of the promotion in `place`. */
export async function promote(model, version, place, again) {
  const asked = await ask(model, version);
  if (!asked) return;
  const name = model.name + ":" + version.number;
  const heard = h("p", { role: "status" }, "Loading the models…");
  const bar = h("progress", { max: 1, hidden: true, "aria-label": "Episodes played" });
  const log = h("ol", { class: "soft steps" });
  put(place, panel("Promotion of " + name, h("div", {}, heard, bar, log)));
  try {
    // Without a signal: the promotion continues on other pages, and ends with the tab.
    const told = await job(
      url(["models", model.name, "promote"]),
      { number: version.number, ...asked },
      (news) => progress(news, heard, bar, log),
    );
    const verdict = told.promoted ? `${name} is ${model.name}@${asked.alias}` : `${name} was not promoted`;
    toast(verdict + ".", told.promoted ? "good" : "info");
    await again();
    const fresh = document.querySelector(".job");
    if (fresh) put(fresh, panel(verdict, h("div", {}, h("p", {}, told.text), checks(told.checks))));
  } catch (error) {
    put(place, panel("Promotion of " + name, empty("The promotion failed", error.message)));
  }
}

function progress({ text, done, of }, heard, bar, log) {
  bar.hidden = !of;
  if (of) bar.value = done / of;
  put(heard, text + (of ? `: ${number(done)} of ${number(of)}` : ""));
  if (!of) log.append(h("li", {}, text));
}

function checks(rows) {
  return h(
    "ul",
    { class: "checks" },
    rows.map(({ name, holds, found }) =>
      h(
        "li",
        { class: holds ? "holds" : "fails" },
        icon(holds ? "check" : "close"),
        h("span", {}, h("b", {}, (holds ? "passed: " : "failed: ") + name), " ", found),
      ),
    ),
  );
}

async function ask(model, version) {
  const { suites: files } = await get(url(["suites"]));
  const suites = Object.keys(files);
  if (!suites.length) {
    await dialog(
      "Promote",
      empty(
        "No suite with a gate",
        "Save a YAML file with entries and a gate in the folder in which you started tfactory ui.",
      ),
    );
    return null;
  }
  const name = model.name + ":" + version.number;
  const suite = h(
    "select",
    { id: "suite" },
    suites.map((each) => h("option", { value: each }, each)),
  );
  const alias = h("input", { id: "alias", value: "champion" });
  const first = () => !(alias.value.trim() in model.aliases);
  const written = () =>
    command(
      `tfactory registry promote ${name} --suite ${files[suite.value]}${alias.value === "champion" ? "" : " --alias " + alias.value}${first() ? " --first" : ""}${where}`,
    );
  const told = h("div", {}, written());
  const note = h("p", { class: "soft" });
  const draw = () => {
    put(told, written());
    put(
      note,
      first()
        ? `${model.name} has no ${alias.value} yet: ${name} becomes it if it passes the guards.`
        : `${name} becomes ${alias.value} only if it is better than ${model.name}:${model.aliases[alias.value]} and passes the guards.`,
    );
  };
  for (const input of [suite, alias]) input.addEventListener("input", draw);
  draw();
  const content = h(
    "div",
    { class: "asked" },
    h("label", { for: "suite" }, "Suite"),
    suite,
    h("label", { for: "alias" }, "Alias"),
    alias,
    note,
    told,
  );
  return await dialog("Promote " + name, content, [
    {
      text: "Promote",
      kind: "main",
      value: () => ({ suite: suite.value, alias: alias.value.trim(), first: first() }),
    },
  ]);
}
