// The curves of a run, with other runs overlaid.
import { h, put } from "./dom.js";
import { keys } from "./keys.js";
import * as live from "./live.js";
import { Overlay } from "./overlay.js";
import { iconButton } from "./parts.js";
import { colour } from "./charts.js";

export async function show({ content, name, query, signal, setQuery }) {
  const kept = Object.fromEntries(query);
  let others = (kept.with ?? "").split(",").filter(Boolean);
  const keep = () => setQuery({ ...kept, with: others.join(",") });
  const bar = h("div", { class: "with" });
  const changed = (view) => {
    Object.assign(kept, view);
    keep();
  };
  const overlay = new Overlay([name, ...others], signal, kept, changed, bar);
  const change = (next) => {
    others = next;
    keep();
    drawBar();
    overlay.choose([name, ...others]);
  };
  const drawBar = () => {
    const rest = [...live.runs.keys()].filter((each) => each !== name && !others.includes(each)).sort();
    const picker = h(
      "select",
      { "aria-label": "Overlay another run", onchange: () => change([...others, picker.value]) },
      h("option", { value: "" }, "Overlay another run…"),
      rest.map((each) => h("option", { value: each }, each)),
    );
    const chip = (each, at) =>
      h(
        "span",
        { class: "chip", style: { "--key": colour(at) } },
        h("i", {}),
        each,
        at > 0 &&
          iconButton("close", "Remove " + each, () => change(others.filter((other) => other !== each))),
      );
    put(bar, others.length > 0 && [name, ...others].map(chip), picker);
  };
  keys(signal, [["+ - 0", "On a chart: zoom in, zoom out, whole range", () => {}]]);
  drawBar();
  live.on("runs", signal, (changed) => changed === null && drawBar());
  document.addEventListener("theme", drawBar, { signal });
  put(content, overlay.element);
  await overlay.read();
}
