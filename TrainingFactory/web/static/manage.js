// Managing runs: tags, notes, names, the archive, deletion; evaluation and export of a run's model.
import { get, post, url, where } from "./api.js";
import { h, put } from "./dom.js";
import { bytes, counted, moment, number } from "./format.js";
import { act, button, command, confirm, dialog, menu, panel, select, stateBadge, toast } from "./parts.js";

/** Writes tags in one line: baseline, team=search. */
export function tagLine(tags) {
  return Object.entries(tags)
    .map(([name, value]) => (value ? name + "=" + value : name))
    .join(", ");
}

/** Reads tags that are separated by commas. */
function parseTags(text) {
  const parts = text
    .split(",")
    .map((part) => part.trim())
    .filter(Boolean);
  const pair = (part) => {
    const at = part.indexOf("=");
    return at < 0 ? [part, ""] : [part.slice(0, at).trim(), part.slice(at + 1).trim()];
  };
  return Object.fromEntries(parts.map(pair));
}

/** A field of a dialog. */
function field(label, input, help = null) {
  input.setAttribute("aria-label", label);
  return h("label", { class: "asked-field" }, h("span", {}, label), input, help && h("small", {}, help));
}

/** Edits name, tags and note of a run. */
export async function edit(row) {
  const name = h("input", { value: row.name, id: "run-name", autocomplete: "off" });
  const tags = h("input", { value: tagLine(row.tags), id: "run-tags", autocomplete: "off" });
  const note = h("textarea", { rows: 4, id: "run-note", value: row.note });
  const content = [
    field("Name", name, row.state === "running" ? "A running run keeps its name." : null),
    field("Tags", tags, "Separate them by commas: baseline, team=search"),
    field("Note", note),
  ];
  name.disabled = row.state === "running";
  const save = { text: "Save", kind: "main", value: () => true };
  if (!(await dialog("Edit " + row.name, content, [save]))) return;
  try {
    const next = name.value.trim();
    // Rename first: an update of the old name would make the page read a run that is gone.
    const renamed = next !== row.name && (await post(url(["runs", row.name, "rename"]), { new_name: next }));
    if (renamed && location.hash.startsWith("#/run/")) location.hash = "#/run/" + encodeURIComponent(next);
    await post(url(["runs", next, "annotate"]), { tags: parseTags(tags.value), note: note.value });
    if (renamed) toast(`Renamed to ${next}. The same in a terminal: ${renamed.command}`, "good");
  } catch (error) {
    toast(error.message, "error");
  }
}

/** Archives runs, or shows them in the list again. */
export async function archive(names, archived) {
  try {
    for (const name of names) await post(url(["runs", name, "annotate"]), { archived });
    toast((archived ? "Archived " : "Unarchived ") + told(names) + ".", "good");
  } catch (error) {
    toast(error.message, "error");
  }
}

const told = (names) => (names.length === 1 ? names[0] : counted(names.length, "run"));

/** Adds tags to several runs. */
export async function tagRuns(rows) {
  const tags = h("input", { id: "run-tags", autocomplete: "off" });
  const help = "Added to the tags of each run. Separate them by commas: baseline, team=search";
  const add = { text: "Add", kind: "main", value: () => tags.value };
  const text = await dialog("Tag " + told(rows.map(({ name }) => name)), field("Tags", tags, help), [add]);
  if (!text) return;
  try {
    for (const row of rows)
      await post(url(["runs", row.name, "annotate"]), { tags: { ...row.tags, ...parseTags(text) } });
  } catch (error) {
    toast(error.message, "error");
  }
}

/** Deletes runs after a confirmation that names what else refers to them; returns those that are gone. */
export async function remove(names) {
  const found = await Promise.all(names.map((name) => get(url(["runs", name, "references"]))));
  const size = found.reduce((sum, each) => sum + each.bytes, 0);
  const needed = found.flatMap((each) => each.needed_by);
  const copies = found.flatMap((each) => each.copies);
  const force = h("input", { type: "checkbox", id: "force" });
  const list = (texts) =>
    h(
      "ul",
      {},
      texts.slice(0, 12).map((text) => h("li", {}, text)),
    );
  const content = [
    h("p", {}, `Checkpoints, episodes and logs (${bytes(size)}) are deleted. This cannot be undone.`),
    names.length > 1 && list(names),
    needed.length > 0 && [
      h("p", { class: "why" }, "Other runs need these files to resume, or as the base of their adapter:"),
      list(needed),
      h("label", { class: "tap" }, force, " Delete anyway"),
    ],
    copies.length > 0 && [h("p", {}, "These keep their own copies and continue to work:"), list(copies)],
    command(
      "tfactory runs delete " + names.join(" ") + (needed.length ? " --force" : "") + where,
      "In a terminal",
    ),
  ];
  if (!(await confirm("Delete " + told(names) + "?", content, "Delete", "danger"))) return [];
  const gone = [];
  for (const name of names) {
    try {
      await post(url(["runs", name, "delete"]), { confirm: name, force: force.checked });
      gone.push(name);
    } catch (error) {
      toast(error.message, "error");
    }
  }
  if (gone.length) toast("Deleted " + told(gone) + ".", "good");
  return gone;
}

/** The actions on selected runs; `removed` gets the names of those that were deleted. */
export function bulkMenu(rows, removed) {
  const names = rows.map(({ name }) => name);
  const archived = rows.every((row) => row.archived);
  const deleted = async () => {
    const gone = new Set(await remove(names));
    if (gone.size) removed(gone);
  };
  return menu("Manage", [
    ["Tag…", () => tagRuns(rows)],
    [archived ? "Unarchive" : "Archive", () => archive(names, !archived)],
    ["Delete…", deleted, "danger"],
  ]);
}

/** A choice of a checkpoint, the newest first. */
function checkpointPicker(checkpoints) {
  const best = checkpoints.some((each) => each.best);
  const steps = [...checkpoints].reverse().map(({ step }) => ["step-" + step, "step " + number(step)]);
  return select(
    "Checkpoint",
    [["last", "last"], ...(best ? [["best", "best on held-out tasks"]] : []), ...steps],
    "last",
    () => {},
  );
}

const count = (value, label) => h("input", { type: "number", min: 1, value, id: label });

/** Starts an evaluation of a run; returns whether it has started. */
export async function evaluate({ row, checkpoints }) {
  const which = checkpointPicker(checkpoints);
  const tasks = count("", "eval-tasks");
  const episodes = count("", "eval-episodes");
  const temperature = h("input", { type: "number", min: 0, step: 0.1, id: "eval-temperature" });
  const content = [
    h(
      "p",
      { class: "soft" },
      "Plays held-out tasks in a separate process, like tfactory eval. Empty fields: as in the run.",
    ),
    field("Checkpoint", which),
    field("Tasks", tasks),
    field("Episodes per task", episodes),
    field("Temperature", temperature),
  ];
  const value = (input) => (input.value === "" ? null : Number(input.value));
  const start = {
    text: "Evaluate",
    kind: "main",
    value: () => ({
      checkpoint: which.value,
      tasks: value(tasks),
      episodes: value(episodes),
      temperature: value(temperature),
    }),
  };
  return await started(row.name, "evaluate", await dialog("Evaluate " + row.name, content, [start]));
}

/** Starts the export of a run's model; returns whether it has started. */
export async function exportModel({ row, checkpoints }) {
  const which = checkpointPicker(checkpoints);
  const folder = h("input", { value: row.name, id: "export-folder", autocomplete: "off" });
  const merge = h("input", { type: "checkbox", id: "export-merge" });
  const dtype = select(
    "Data type",
    [["", "as trained"], "float32", "bfloat16", "float16"].map((each) =>
      Array.isArray(each) ? each : [each, each],
    ),
    "",
    () => {},
  );
  const lora = row.options["lora.enabled"] === true;
  const content = [
    h(
      "p",
      { class: "soft" },
      "Writes a model that transformers and vLLM load, to exports/ in the folder of runs.",
    ),
    field("Checkpoint", which),
    field("Folder", folder),
    lora && h("label", { class: "tap" }, merge, " Merge the adapter into its base model"),
    field("Data type", dtype),
  ];
  const start = {
    text: "Export",
    kind: "main",
    value: () => ({
      checkpoint: which.value,
      folder: folder.value.trim(),
      merge: merge.checked,
      dtype: dtype.value || null,
    }),
  };
  return await started(row.name, "export", await dialog("Export " + row.name, content, [start]));
}

async function started(name, kind, asked) {
  if (!asked) return false;
  try {
    await post(url(["runs", name, kind]), asked);
    return true;
  } catch (error) {
    toast(error.message, "error");
    return false;
  }
}

/** The evaluations and exports of a run that this server has started, with the end of their output. */
export class Jobs {
  constructor(name, signal, ended) {
    Object.assign(this, { name, signal, ended, running: 0 });
    this.element = h("div", { class: "jobs" });
    this.read();
  }

  async read() {
    clearTimeout(this.timer);
    try {
      const { jobs } = await get(url(["runs", this.name, "jobs"]), this.signal);
      const running = jobs.filter(({ state }) => state === "running").length;
      if (running < this.running) this.ended();
      this.running = running;
      this.draw(jobs);
      if (running) this.timer = setTimeout(() => this.signal.aborted || this.read(), 1000);
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message, "error");
    }
  }

  draw(jobs) {
    const newest = jobs.filter((job, at) => jobs.findIndex(({ kind }) => kind === job.kind) === at);
    const titles = { eval: "Evaluation", export: "Export" };
    put(
      this.element,
      newest.map(({ kind, state, command: text, started: at, output }) =>
        panel(
          titles[kind] + ", " + moment(at),
          h("div", { role: "status" }, command(text), output && h("pre", {}, output)),
          [
            stateBadge(state),
            state === "running" &&
              button("Cancel", (event) => this.cancel(event.currentTarget), { class: "small danger" }),
          ],
        ),
      ),
    );
  }

  async cancel(pressed) {
    await act(pressed, () => post(url(["runs", this.name, "cancel"])));
    await this.read();
  }
}
