// Keyboard shortcuts of the frame and the current page, and the list that ? shows.
import { h } from "./dom.js";
import { dialog } from "./parts.js";

const listening = []; // {key, what, call}: later ones come first
let before = ""; // the first key of a pair such as "g r"

/** Listens to keys until the page is left: keys(signal, [["j", "Next row", next]]). A key may be a pair, "g r". */
export function keys(signal, list) {
  const added = list.map(([key, what, call]) => ({ key, what, call }));
  listening.unshift(...added);
  signal?.addEventListener("abort", () => {
    for (const each of added) listening.splice(listening.indexOf(each), 1);
  });
}

const typing = (element) =>
  element.matches("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select");

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing(event.target)) return event.target.blur();
  if (typing(event.target) || document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  const pair = before + " " + event.key;
  const found =
    listening.find((each) => each.key === pair) ?? listening.find((each) => each.key === event.key);
  before = event.key;
  if (!found) return;
  before = "";
  event.preventDefault();
  found.call();
});

/** Shows all active shortcuts. */
export function showKeys() {
  const seen = new Set();
  const rows = listening.filter(({ key, what }) => what && !seen.has(key) && seen.add(key));
  const list = rows.map(({ key, what }) => [
    h(
      "dt",
      {},
      (key === " " ? ["space"] : key.split(" ")).map((k) => h("kbd", {}, k)),
    ),
    h("dd", {}, what),
  ]);
  dialog("Keyboard", h("dl", { class: "keys" }, list));
}
