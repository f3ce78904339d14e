// Registry: models with their versions and aliases; lineage of a version; comparison; promotion; rollback.
import { get, post, url, where } from "./api.js";
import * as compare from "./compare.js";
import { h, put, visible } from "./dom.js";
import { counted, moment, number, plain } from "./format.js";
import { keys } from "./keys.js";
import { chain } from "./lineage.js";
import {
  act,
  button,
  command,
  confirm,
  empty,
  failed,
  link,
  notFound,
  pairs,
  panel,
  table,
  toast,
  waiting,
} from "./parts.js";
import { promote } from "./promote.js";
import { evaluations, share } from "./run_findings.js";

export async function show(place) {
  const { main, parts, signal } = place;
  put(main, waiting());
  const { models } = await get(url(["models"]), signal);
  if (parts[0] === "compare") return await compare.show(place, models);
  if (!models.length)
    return void put(
      main,
      head(),
      empty(
        "No registered models",
        "Set registry.name in a run's config, or register a run by hand: ",
        h("code", {}, "tfactory registry register NAME RUN" + where),
      ),
    );
  const model = parts.length ? models.find(({ name }) => name === parts[0]) : models[0];
  const version =
    parts.length > 1
      ? model?.versions.find(({ number: each }) => String(each) === parts[1])
      : model && (champion(model) ?? model.versions.at(-1));
  if (!model || (parts.length > 1 && !version) || parts.length > 2) return void put(main, notFound());
  const again = () => show(place).catch((error) => error.name === "AbortError" || put(main, failed(error)));
  const job = h("div", { class: "job" });
  const detail = h("div", { class: "view" }, waiting());
  put(
    main,
    head(),
    models.length > 1 && tabs(models, model),
    h("div", { class: "registry" }, h("div", {}, versions(model, version, job, again), job), detail),
  );
  keyboard(model, version, signal);
  if (version) await showVersion(detail, model, version, signal);
  return undefined;
}

function head() {
  return h("header", { class: "head" }, h("h1", {}, "Registry"));
}

function champion(model) {
  return model.versions.find(({ aliases }) => aliases.includes("champion"));
}

function tabs(models, chosen) {
  return h(
    "nav",
    { class: "tabs", "aria-label": "Models" },
    models.map(({ name, versions: all }) =>
      h(
        "a",
        {
          href: "#/registry/" + encodeURIComponent(name),
          "aria-current": name === chosen.name ? "page" : null,
        },
        name,
        h("span", { class: "tag" }, all.length),
      ),
    ),
  );
}

function keyboard(model, version, signal) {
  const order = [...model.versions].reverse();
  const go = (by) => {
    const at = order.indexOf(version) + by;
    if (order[at]) location.hash = `#/registry/${encodeURIComponent(model.name)}/${order[at].number}`;
  };
  keys(signal, [
    ["j", "Next version", () => go(1)],
    ["k", "Previous version", () => go(-1)],
  ]);
}

/** The versions of a model, the newest first, with their actions. */
function versions(model, chosen, job, again) {
  const back = Object.keys(model.aliases).map((alias) =>
    button("Roll back " + alias, (event) => rollback(event.currentTarget, model, alias, again), {
      class: "small",
    }),
  );
  const heads = ["Version", "Run", "Success", { text: "Action", class: "num" }];
  const rows = [...model.versions].reverse().map((version) => {
    const last = latest(version);
    const name = link(
      `registry/${encodeURIComponent(model.name)}/${version.number}`,
      model.name + ":" + version.number,
    );
    const named = version.aliases.map((alias) => h("span", { class: "tag accent" }, alias));
    const go =
      !version.aliases.includes("champion") &&
      button("Promote", () => promote(model, version, job, again), {
        class: "small",
        "aria-label": `Promote ${model.name}:${version.number}`,
      });
    return [
      [name, " ", named],
      version.run && link("run/" + encodeURIComponent(version.run), version.run),
      last && share(last.success, last.low, last.high),
      go,
    ];
  });
  const list = table("Versions of " + model.name, heads, rows);
  [...list.querySelectorAll("tbody tr")].forEach((row, at) =>
    row.classList.toggle("at", model.versions.at(-1 - at) === chosen),
  );
  return panel(model.name, list, back);
}

function latest(version) {
  return version.evaluations.filter(({ success }) => success !== null).at(-1);
}

async function rollback(pressed, model, alias, again) {
  const now = model.name + ":" + model.aliases[alias];
  const text = h(
    "p",
    {},
    `${model.name}@${alias} is ${now}. It will be set to its previous version; servers that follow the alias switch too.`,
  );
  if (
    !(await confirm(
      "Roll back " + alias + "?",
      [text, command(`tfactory registry rollback ${model.name} --alias ${alias}${where}`)],
      "Roll back",
      "danger",
    ))
  )
    return;
  const asked = { alias, number: model.aliases[alias] };
  const told = await act(pressed, () => post(url(["models", model.name, "rollback"]), asked));
  if (!told) return;
  toast(`${model.name}@${alias} is ${told.version} again.`, "good");
  await again();
}

async function showVersion(place, model, chosen, signal) {
  try {
    const told = await get(url(["models", model.name, chosen.number]), signal);
    const { version, lineage, commands, decisions, folder } = told;
    const others = model.versions.filter(({ number: each }) => each !== chosen.number);
    const facts = [
      ["Created", moment(version.created) + (version.who ? " by " + version.who : "")],
      ["Source", version.run ? `run ${version.run}, step ${number(version.step)}` : "–"],
      ["Base", version.base ?? "–"],
      ["Kind", version.kind],
      ["Digest", h("code", {}, version.digest)],
      ["Folder", h("code", {}, folder)],
      ...Object.entries(version.tags),
    ];
    const picker = h(
      "select",
      {
        "aria-label": "Compare with",
        onchange: () =>
          (location.hash = `#/registry/compare?first=${encodeURIComponent(picker.value)}&second=${encodeURIComponent(version.version)}`),
      },
      h("option", { value: "" }, "Compare with…"),
      others.map(({ version: name, aliases }) => h("option", { value: name }, [name, ...aliases].join(", "))),
    );
    put(
      place,
      h(
        "header",
        { class: "head" },
        h("h2", { class: "big" }, version.version),
        version.aliases.map((alias) => h("span", { class: "tag accent" }, alias)),
        version.description && h("span", { class: "soft" }, version.description),
        h("div", { class: "actions" }, others.length > 0 && picker),
      ),
      panel("Lineage", lineage.length ? chain(lineage) : empty("No lineage recorded", "")),
      panel("Evaluations", evaluations(version.evaluations)),
      h(
        "div",
        { class: "columns" },
        panel("Details", pairs(facts)),
        panel("Decisions", decided(decisions, model.name)),
        commands.length > 0 &&
          panel(
            "Commands to reproduce it",
            h(
              "div",
              { class: "commands" },
              commands.map((text) => command(text)),
            ),
          ),
      ),
    );
  } catch (error) {
    if (error.name !== "AbortError") put(place, failed(error));
  }
}

/** The decisions on a model's aliases, the newest first. */
function decided(decisions, model) {
  if (!decisions.length) return empty("No decisions", "Alias changes and promotions are listed here.");
  return h(
    "ul",
    { class: "decisions" },
    [...decisions].reverse().map(({ kind, alias, number: to, was, who, created, evidence }) => {
      const old = was && `${model}:${was}`;
      const moved = [to && `${model}:${to}`, old && (kind === "refuse" ? old + " stays" : "was " + old)]
        .filter(Boolean)
        .join(", ");
      const why =
        evidence &&
        Object.keys(evidence).length > 0 &&
        h(
          "details",
          {},
          h(
            "summary",
            {},
            "Evidence, " + counted(Object.keys(evidence).length, "entry").replace("entrys", "entries"),
          ),
          h("pre", {}, visible(JSON.stringify(evidence, null, 1))),
        );
      return h(
        "li",
        {},
        h("b", {}, plain(kind)),
        " ",
        alias && h("span", { class: "tag" }, alias),
        " ",
        moved,
        h("small", {}, [moment(created), who].filter(Boolean).join(", ")),
        why,
      );
    }),
  );
}
