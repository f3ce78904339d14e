// The lineage, checkpoints, files and machine of a run.
import { h, put } from "./dom.js";
import { bytes, moment, number } from "./format.js";
import { chain } from "./lineage.js";
import { empty, pairs, panel, table } from "./parts.js";

export async function show({ content, view }) {
  const { lineage, checkpoints, files, about, row, tools } = view;
  const steps = checkpoints.map(({ name, step, best }) => [
    h("code", {}, name),
    number(step),
    best && h("span", { class: "tag accent" }, "best"),
  ]);
  const made = checkpoints.length
    ? table("Checkpoints", ["Name", { text: "Step", class: "num" }, "Best"], steps)
    : empty("No checkpoint yet", "The run saves one every logging.checkpoint_every steps.");
  const sizes = table(
    "Files",
    ["File", { text: "Size", class: "num" }],
    files.map((file) => [h("code", {}, file.name), bytes(file.bytes)]),
  );
  const facts = [["Started", moment(row.started)], ["Tools", tools.join(", ") || "none"], ...versions(about)];
  put(
    content,
    panel("Lineage", chain([...lineage, { name: row.name, what: "this run" }])),
    h(
      "div",
      { class: "columns" },
      panel("Checkpoints", made),
      panel("Files", sizes),
      panel("Environment", pairs(facts)),
    ),
  );
}

function versions(about) {
  const rows = [
    ["Machine", about.platform],
    ["Processors", about.cpus],
    ["GPU", about.gpu],
    ["Commit", about.commit],
    ...Object.entries(about.versions ?? {}),
  ];
  return rows
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
}
