// Components that all pages share.
import { h, put, scroller } from "./dom.js";
import { icon } from "./icons.js";
import { number } from "./format.js";

/** A state as a dot and a word: never by colour alone. */
export function stateBadge(state) {
  return h(
    "span",
    { class: "state state-" + state },
    h("span", { class: "dot", "aria-hidden": "true" }),
    state,
  );
}

export function link(to, ...children) {
  return h("a", { href: "#/" + to }, ...children);
}

export function button(text, onclick, more = {}) {
  const { iconName, ...attributes } = more;
  return h(
    "button",
    { type: "button", onclick, ...attributes },
    iconName && icon(iconName),
    text && h("span", {}, text),
  );
}

/** A button with only an icon, and a label for screen readers. */
export function iconButton(name, label, onclick, more = {}) {
  return h(
    "button",
    { type: "button", class: "bare", "aria-label": label, title: label, onclick, ...more },
    icon(name),
  );
}

/** A button that copies the current text. */
export function copyButton(label, text) {
  const copy = iconButton("copy", label, async () => {
    // Browsers allow clipboard access only on localhost and over HTTPS.
    if (!navigator.clipboard) return toast("The browser blocks copying; select the text instead.", "error");
    await navigator.clipboard.writeText(text());
    put(copy, icon("check"));
    setTimeout(() => put(copy, icon("copy")), 1500);
    return undefined;
  });
  return copy;
}

/** A command that can be copied. */
export function command(text, label = null) {
  return h(
    "div",
    { class: "command" },
    label && h("span", { class: "label" }, label),
    h("code", {}, text),
    copyButton("Copy the command", () => text),
  );
}

/** The address without its view and query: a toast belongs to it. */
const pageOf = () => location.hash.split("?")[0].split("/").slice(0, 3).join("/");

/** Shows a message until the page is left; all but errors close after six seconds. */
export function toast(text, kind = "info") {
  const place = document.getElementById("toasts");
  const close = () => shown.remove();
  const shown = h(
    "div",
    { class: "toast toast-" + kind, "data-page": pageOf() },
    h("span", {}, text),
    iconButton("close", "Close", close),
  );
  place.append(shown);
  if (kind !== "error") setTimeout(close, 6000);
}

/** Removes the toasts of other pages. */
export function dropToasts() {
  for (const shown of document.querySelectorAll(".toast"))
    if (shown.dataset.page !== pageOf()) shown.remove();
}

/** Runs an action of a button, which is disabled and shows a spinner meanwhile; an error becomes a toast. */
export async function act(element, action) {
  element.disabled = true;
  element.classList.add("busy");
  try {
    return await action();
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message, "error");
    return undefined;
  } finally {
    element.disabled = false;
    element.classList.remove("busy");
  }
}

/** Text shown while a run starts. */
export const STARTING = "Starting the run. Its page opens once the config and the tasks are checked.";

/** Shows a text and the seconds that have passed in `place` until the action ends. */
export async function timed(place, text, action) {
  const began = Date.now();
  const seconds = h("span", { "aria-hidden": "true" }); // screen readers announce the text once
  const count = () => (seconds.textContent = " " + Math.round((Date.now() - began) / 1000) + " s");
  const clock = setInterval(count, 1000);
  put(place, text, seconds);
  try {
    return await action();
  } finally {
    clearInterval(clock);
    put(place);
  }
}

/** Opens a dialog; the promise gives the value of the button that closed it, or null. */
export function dialog(title, content, buttons = []) {
  return new Promise((resolve) => {
    const shown = h("dialog", { "aria-label": title });
    const end = (value) => {
      shown.close(value);
      shown.remove();
      resolve(value);
    };
    const foot = buttons.map(({ text, value, kind }) => button(text, () => end(value()), { class: kind }));
    const head = h(
      "header",
      {},
      h("h2", {}, title),
      iconButton("close", "Close", () => end(null)),
    );
    put(shown, head, h("div", { class: "content" }, content), foot.length > 0 && h("footer", {}, foot));
    shown.addEventListener("cancel", () => end(null));
    shown.addEventListener("click", (event) => event.target === shown && end(null));
    document.body.append(shown);
    shown.showModal();
    shown.querySelector(".content :is(select, input:not([type=checkbox])), footer button")?.focus();
  });
}

/** Asks for confirmation; resolves to true if confirmed. */
export async function confirm(title, content, yes, kind = "main") {
  const no = { text: "Cancel", value: () => false };
  return (await dialog(title, content, [no, { text: yes, value: () => true, kind }])) === true;
}

/** A button that opens a list of actions: [text, action, class]. */
export function menu(label, items, more = {}) {
  const close = () => made.removeAttribute("open");
  const list = items.map(([text, action, kind]) =>
    button(
      text,
      () => {
        close();
        action();
      },
      { class: kind },
    ),
  );
  const made = h(
    "details",
    { class: "menu", ...more },
    h("summary", { class: "button small" }, label, icon("down", 14)),
    h("div", { class: "menu-list" }, list),
  );
  made.addEventListener("toggle", () => {
    if (!made.open) return;
    const outside = (event) => made.contains(event.target) || close();
    const escape = (event) => event.key === "Escape" && (close(), made.querySelector("summary").focus());
    document.addEventListener("pointerdown", outside);
    made.addEventListener("keydown", escape);
    made.addEventListener(
      "toggle",
      () => {
        document.removeEventListener("pointerdown", outside);
        made.removeEventListener("keydown", escape);
      },
      { once: true },
    );
  });
  return made;
}

/** A row of buttons of which one is pressed. */
export function segments(label, options, chosen, changed) {
  const group = h("div", { class: "segments", role: "group", "aria-label": label });
  const choose = (value) => {
    for (const each of group.children)
      each.setAttribute("aria-pressed", String(each.dataset.value === value));
  };
  for (const [value, text] of options) {
    const pressed = () => {
      choose(value);
      changed(value);
    };
    group.append(h("button", { type: "button", "data-value": value, onclick: pressed }, text));
  }
  choose(chosen);
  return group;
}

export function select(label, options, chosen, changed, more = {}) {
  const made = h("select", { "aria-label": label, onchange: () => changed(made.value), ...more });
  for (const [value, text] of options) made.append(h("option", { value, selected: value === chosen }, text));
  return made;
}

/** A field to search with; / puts the cursor there. */
export function searchField(label, value, changed) {
  const input = h("input", {
    type: "search",
    placeholder: label,
    "aria-label": label,
    value,
    oninput: () => changed(input.value),
  });
  return h("label", { class: "search" }, icon("search"), input, h("kbd", { "aria-hidden": "true" }, "/"));
}

export function progress(step, steps) {
  const share = steps ? Math.min(1, step / steps) : 0;
  const bar = h("span", { class: "fill", style: { width: (share * 100).toFixed(1) + "%" } });
  const text = steps ? number(step) + " / " + number(steps) : number(step);
  const named = { class: "progress", role: "img", "aria-label": "step " + text };
  return h("span", named, h("span", { class: "bar" }, bar), h("span", { class: "num" }, text));
}

/** The empty state of a list, with a hint. */
export function empty(title, ...help) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, ...help));
}

/** The page for an unknown address. */
export function notFound() {
  return [
    h("header", { class: "head" }, h("h1", {}, "Page not found")),
    empty(
      "There is no page at this address",
      h("code", {}, location.hash),
      h("br", {}),
      "Go to ",
      link("runs", "the list of runs"),
      ", or choose a page in the navigation.",
    ),
  ];
}

export function failed(error) {
  return h(
    "div",
    { class: "empty bad", role: "alert" },
    h("strong", {}, "Loading failed"),
    h("p", {}, error.message),
  );
}

export function waiting(text = "Reading…") {
  return h("div", { class: "waiting", "aria-busy": "true" }, text);
}

/** A table of names and values. */
export function pairs(rows) {
  return h(
    "dl",
    { class: "pairs" },
    rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/** Figures side by side: rows of a name, a value and a note or null. */
export function tiles(rows) {
  return h(
    "dl",
    { class: "tiles" },
    rows.map(([name, value, note]) =>
      h(
        "div",
        {},
        h("dt", {}, name),
        h("dd", { class: "num" }, value),
        note && h("dd", { class: "note" }, note),
      ),
    ),
  );
}

export function panel(title, content, more = null) {
  return h("section", { class: "panel" }, h("header", {}, h("h2", {}, title), more), content);
}

/** A table: heads are texts or {text, class}; rows are lists of cells. */
export function table(label, heads, rows) {
  const head = heads.map((each) => h("th", { scope: "col", class: each.class }, each.text ?? each));
  const cells = (row) => row.map((cell, at) => h("td", { class: heads[at].class }, cell));
  const body = rows.map((row) => h("tr", {}, cells(row)));
  const whole = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
  return scroller(h("div", { class: "table" }, whole));
}
