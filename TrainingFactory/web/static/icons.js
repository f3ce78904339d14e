// Small drawings of our own, 24 by 24, in the colour of the text around them.
import { svg } from "./dom.js";

const LINES = {
  runs: "M3 17l5-6 4 3 8-9 M20 5v4 M20 5h-4",
  start: "M12 5v14 M5 12h14",
  wizard: "M5 19L16 8 M14 6l4 4 M18 3v3 M16.5 4.5h3 M7 4v2 M6 5h2 M20 14v2 M19 15h2",
  play: "M4 5h16v11h-9l-4 4v-4H4z M8 9h8 M8 12h5",
  registry: "M4 8l8-4 8 4-8 4z M4 8v8l8 4 8-4V8 M12 12v8",
  judges: "M12 4v16 M8 20h8 M5 7h14 M5 7l-3 7h6z M19 7l-3 7h6z",
  sun: "M12 8a4 4 0 100 8 4 4 0 000-8 M12 2v3 M12 19v3 M2 12h3 M19 12h3 M5 5l2 2 M17 17l2 2 M19 5l-2 2 M7 17l-2 2",
  moon: "M20 14.5A8.5 8.5 0 019.5 4 8.5 8.5 0 1020 14.5z",
  auto: "M12 3a9 9 0 100 18 9 9 0 000-18z M12 3v18 M12 7h7 M12 12h9 M12 17h7",
  help: "M12 3a9 9 0 100 18 9 9 0 000-18z M9.5 9.5a2.5 2.5 0 114 2c-1 .7-1.5 1.2-1.5 2.2 M12 17v.1",
  copy: "M9 9h11v11H9z M5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  close: "M6 6l12 12 M18 6L6 18",
  search: "M11 4a7 7 0 100 14 7 7 0 000-14z M16 16l5 5",
  stop: "M7 7h10v10H7z",
  resume: "M8 5l11 7-11 7z",
  wide: "M4 9V4h5 M20 15v5h-5 M4 4l6 6 M20 20l-6-6",
  list: "M8 6h12 M8 12h12 M8 18h12 M4 6v.1 M4 12v.1 M4 18v.1",
  call: "M5 5v6a3 3 0 003 3h11 M15 10l4 4-4 4",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  warning: "M12 4l9 16H3z M12 10v4 M12 17v.1",
  edit: "M4 20l1-4L16 5l3 3L8 19z M14 7l3 3",
  again: "M4 12a8 8 0 0113-6l3 3 M20 4v5h-5 M20 12a8 8 0 01-13 6l-3-3 M4 20v-5h5",
  down: "M6 9l6 6 6-6",
  download: "M12 4v11 M7 10l5 5 5-5 M5 20h14",
  image: "M4 5h16v14H4z M4 16l5-5 4 4 3-3 4 4 M9 9v.1",
  bolt: "M13 3L5 14h6l-1 7 8-11h-6z",
};

/** Draws an icon; it is decoration, so the control around it carries the name. */
export function icon(name, size = 16) {
  const frame = { viewBox: "0 0 24 24", width: size, height: size, class: "icon", "aria-hidden": "true" };
  return svg("svg", frame, svg("path", { d: LINES[name] }));
}
