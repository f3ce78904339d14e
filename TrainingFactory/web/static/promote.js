// A promotion: which suite, which alias; then the gate's work as it goes, and its verdict.
import { get, job, url, where } from "./api.js";
import { h, put } from "./dom.js";
import { number } from "./format.js";
import { icon } from "./icons.js";
import { command, dialog, empty, panel, toast } from "./parts.js";

/** Asks for suite and alias, and shows in `place` how the promotion goes. */
export async function promote(model, version, place, again) {
  const asked = await ask(model, version);
  if (!asked) return;
  const name = model.name + ":" + version.number;
  const heard = h("p", { role: "status" }, "Reading the models…");
  const bar = h("progress", { max: 1, hidden: true, "aria-label": "Episodes played" });
  const log = h("ol", { class: "soft steps" });
  put(place, panel("Promotion of " + name, h("div", {}, heard, bar, log)));
  try {
    // Without a signal: it goes on while other pages are looked at, and ends with the tab.
    const told = await job(
      url(["models", model.name, "promote"]),
      { number: version.number, ...asked },
      (news) => progress(news, heard, bar, log),
    );
    const verdict = told.promoted ? `${name} is ${model.name}@${asked.alias}` : `${name} stays out`;
    toast(verdict + ".", told.promoted ? "good" : "info");
    await again();
    const fresh = document.querySelector(".job");
    if (fresh) put(fresh, panel(verdict, h("div", {}, h("p", {}, told.text), checks(told.checks))));
  } catch (error) {
    put(place, panel("Promotion of " + name, empty("It came to nothing", error.message)));
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
        h("span", {}, h("b", {}, (holds ? "holds: " : "fails: ") + name), " ", found),
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
        "There is no suite with a gate here",
        "Write one as a YAML file with entries and a gate into the folder in which the page was started.",
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
        ? `${model.name} has no ${alias.value} yet: ${name} becomes it if it holds the guards.`
        : `${name} becomes ${alias.value} only if it proves better than ${model.name}:${model.aliases[alias.value]} and holds the guards.`,
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
