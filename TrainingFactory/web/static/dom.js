// Creates elements. Children are nodes or text: no string is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element: h("button", {class: "small", onclick: go, disabled: true}, "Go"). */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an element of a drawing. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) set(element, name, value);
  add(element, children);
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "style")
    for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
  else if (name === "value") element.value = value;
  else element.setAttribute(name, value === true ? "" : value);
}

/** Appends nodes and texts; null and false are left out, lists are opened. */
export function add(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

/** Replaces what an element holds. */
export function put(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

const scrollers = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const scrolls = target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight;
    if (scrolls) target.setAttribute("tabindex", "0");
    else target.removeAttribute("tabindex");
  }
});

/** Lets the keyboard reach an element while it has more content than room. */
export function scroller(element) {
  scrollers.observe(element);
  return element;
}

/** Returns a function that runs `call` once it has not been called for this many milliseconds. */
export function debounce(milliseconds, call) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), milliseconds);
  };
}

// Control characters in texts of models, tools and files would be invisible: show their Unicode pictures.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
const HIDDEN = /[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\u{e0000}-\u{e007f}]/gu;

/** Makes invisible characters of foreign text visible. */
export function visible(text) {
  return String(text ?? "")
    .replace(CONTROLS, (c) => (c === "\u007f" ? "\u2421" : String.fromCodePoint(0x2400 + c.codePointAt(0))))
    .replace(
      HIDDEN,
      (c) => "\u27e8U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9",
    );
}

/** Highlights a changed row for a moment. */
export function flash(row) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  row.animate([{ background: "var(--accent-soft)" }, {}], { duration: 1200 });
}
