// The page Wizard.
import { h, put } from "./dom.js";

export async function show({ main }) {
  put(main, h("header", { class: "head" }, h("h1", {}, "Wizard")));
}
