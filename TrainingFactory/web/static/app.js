// The frame: navigation, routes, theme and keys. Each page is a module with show(place); place.signal aborts when it is left.
import { about } from "./api.js";
import { h, put } from "./dom.js";
import { icon } from "./icons.js";
import { keys, showKeys } from "./keys.js";
import * as live from "./live.js";
import { dropToasts, failed, iconButton, notFound } from "./parts.js";
import * as runsPage from "./runs.js";
import * as runPage from "./run.js";
import * as startPage from "./start.js";
import * as wizardPage from "./wizard.js";
import * as playPage from "./play.js";
import * as registryPage from "./registry.js";
import * as judgesPage from "./judges.js";

const PAGES = [
  { path: "runs", title: "Runs", key: "r", page: runsPage },
  { path: "start", title: "Start", key: "s", page: startPage },
  { path: "wizard", title: "Wizard", key: "w", page: wizardPage },
  { path: "play", title: "Play", key: "p", page: playPage },
  { path: "registry", title: "Registry", key: "m", page: registryPage, deep: true }, // checks the rest of the address
  { path: "judges", title: "Judges", key: "j", page: judgesPage, deep: true },
];
const NOWHERE = { path: "", title: "Page not found", page: { show: async () => put(main, notFound()) } };
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main");
let leave = new AbortController();
let shown = null;

/** Parses the address, such as #/run/NAME/episodes?step=3. */
function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts: parts.length ? parts : ["runs"], query: new URLSearchParams(query ?? ""), path };
}

/** Decodes a part of the address; an invalid one is returned unchanged. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function show() {
  const { parts, query, path } = route();
  const run = parts[0] === "run" && parts.length > 1 ? parts[1] : null;
  const listed = PAGES.find((each) => each.path === (run === null ? parts[0] : "runs"));
  const known = run !== null || parts.length === 1 || listed?.deep ? (listed ?? NOWHERE) : NOWHERE;
  const page = run === null ? known.page : runPage;
  leave.abort();
  leave = new AbortController();
  for (const each of document.querySelectorAll("#rail a[data-path]")) {
    if (each.dataset.path === known.path) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.title = (run ?? known.title) + " · TrainingFactory";
  live.watch(run);
  dropToasts();
  const place = {
    main,
    parts: parts.slice(1),
    query,
    signal: leave.signal,
    setQuery: (next) => keepQuery(path, next),
  };
  const thing = parts.slice(0, 2).join("/"); // views of the same item keep the scroll position
  if (thing !== shown) {
    window.scrollTo(0, 0);
    if (shown !== null) main.focus({ preventScroll: true }); // screen readers start at the top of the page
  }
  shown = thing;
  main.className = "page-" + parts[0];
  page.show(place).catch((error) => error.name === "AbortError" || put(main, failed(error)));
}

/** Writes the filters and choices of a page into its address, so that it can be bookmarked and shared. */
function keepQuery(path, query) {
  const kept = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const text = new URLSearchParams(kept).toString();
  history.replaceState(null, "", "#/" + (path || "runs") + (text ? "?" + text : ""));
}

function rail(told) {
  const running = h("span", { class: "count", hidden: true });
  const links = PAGES.map(({ path, title }) =>
    h(
      "a",
      { href: "#/" + path, "data-path": path, title },
      icon(path, 18),
      h("span", {}, title),
      path === "runs" && running,
    ),
  );
  const state = h("span", { class: "connection", role: "status" });
  const theme = iconButton("auto", "Theme", nextTheme, { id: "theme" });
  const help = iconButton("help", "Keyboard shortcuts", showKeys);
  const brand = h(
    "a",
    { class: "brand", href: "#/runs", "aria-label": "TrainingFactory" },
    h("img", { src: "/static/icon.svg", alt: "", width: 22, height: 22 }),
    h("span", {}, "TrainingFactory"),
  );
  const folder = h("span", { class: "folder", title: told.runs_folder }, h("bdi", {}, told.runs_folder));
  const foot = h(
    "div",
    { class: "foot" },
    state,
    folder,
    h("div", { class: "tools" }, theme, help, h("span", { class: "version" }, told.version)),
  );
  put(document.getElementById("rail"), brand, h("nav", { "aria-label": "Pages" }, links), foot);
  const words = { live: "Live", lost: "Connection lost", connecting: "Connecting" };
  const connected = () => {
    state.className = "connection " + live.connection;
    put(state, h("span", { class: "dot", "aria-hidden": "true" }), h("span", {}, words[live.connection]));
  };
  live.on("connection", undefined, connected);
  live.on("runs", undefined, () => {
    const count = [...live.runs.values()].filter((row) => row.state === "running").length;
    running.hidden = count === 0;
    running.textContent = count;
    running.title = count + " running";
  });
  connected();
  tellTheme();
}

function nextTheme() {
  const now = localStorage.getItem("theme") ?? "auto";
  localStorage.setItem("theme", THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  document.dispatchEvent(new Event("choose-theme"));
  tellTheme();
}

function tellTheme() {
  const chosen = localStorage.getItem("theme") ?? "auto";
  const theme = document.getElementById("theme");
  const label = "Theme: " + { auto: "system", light: "light", dark: "dark" }[chosen];
  put(theme, icon({ auto: "auto", light: "sun", dark: "moon" }[chosen]));
  theme.setAttribute("aria-label", label);
  theme.title = label;
}

async function begin() {
  keys(undefined, [
    ...PAGES.map(({ path, title, key }) => ["g " + key, title, () => (location.hash = "#/" + path)]),
    ["t", "Switch theme: light, dark or system", nextTheme],
    ["?", "Show this list", showKeys],
  ]);
  addEventListener("hashchange", show);
  document.querySelector("a.skip").addEventListener("click", (event) => {
    event.preventDefault(); // the part after # is the route
    main.focus();
  });
  try {
    rail(await about());
    show();
  } catch (error) {
    put(main, failed(error));
  }
}

begin();
