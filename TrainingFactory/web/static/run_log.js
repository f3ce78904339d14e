// The log of a run, updated as it is written.
import { get, url } from "./api.js";
import { h, put, visible } from "./dom.js";
import { on } from "./live.js";
import { empty } from "./parts.js";

const MOST = 400_000; // characters kept on the page

export async function show({ content, name, signal }) {
  const text = h("pre", { class: "panel log", tabindex: "0", "aria-label": "Log" });
  const follow = h("input", { type: "checkbox", checked: true });
  const note = h(
    "p",
    { class: "soft note", hidden: true },
    "Only the end is shown; the whole log is in the run's folder.",
  );
  const none = empty(
    "This run has no log",
    "Only runs started or resumed on this page have one; others print to their terminal.",
  );
  const bar = h("div", { class: "controls", hidden: true }, h("label", {}, follow, " Follow the end"));
  put(content, bar, note, text, none);
  let offset = -200_000; // from the end
  let reading = Promise.resolve();
  const read = async () => {
    const more = await get(url(["runs", name, "log"], { after: offset }), signal);
    if (more.again) text.textContent = "";
    offset = more.offset;
    const whole = text.textContent + visible(more.text);
    note.hidden = note.hidden && whole.length <= MOST;
    text.textContent = whole.slice(-MOST);
    none.hidden = whole !== "";
    text.hidden = bar.hidden = whole === "";
    if (follow.checked) text.scrollTop = text.scrollHeight;
    if (more.more) await read();
  };
  const again = () =>
    (reading = reading
      .then(read)
      .catch(
        (error) =>
          error.name === "AbortError" || put(content, empty("Cannot read the log", error.message)),
      ));
  on("log", signal, again);
  await again();
}
