// Live state shared by all pages: rows of all runs, state of the connection, and changes of one run.
import { get, url } from "./api.js";

export const news = new EventTarget(); // "runs", "connection", "metrics", "log", "findings"
export const runs = new Map();
export let connection = "connecting";
export let loaded = false;
export let trouble = null; // why the list of runs could not be read

let source = null;
let watched = null;

/** Listens until the page is left. */
export function on(kind, signal, heard) {
  news.addEventListener(kind, (event) => heard(event.detail), { signal });
}

/** Opens the stream of events, with those of one run if a name is given. */
export function watch(name = null) {
  if (source && watched === name && source.readyState !== EventSource.CLOSED) return;
  source?.close();
  watched = name;
  source = new EventSource(url(["events"], { run: name }));
  source.onopen = () => {
    state("live");
    refresh();
    // Views fetch what was written while the stream was closed.
    tell("metrics", null);
    tell("log", null);
  };
  source.onerror = () => {
    state("lost");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => watch(watched), 2000);
  };
  source.addEventListener("runs", (event) => patch(JSON.parse(event.data)));
  for (const kind of ["metrics", "log", "findings"]) {
    source.addEventListener(kind, (event) => tell(kind, JSON.parse(event.data)));
  }
}

/** Fetches all rows again. */
export async function refresh() {
  try {
    const told = await get(url(["runs"]));
    trouble = null;
    loaded = true;
    runs.clear();
    for (const row of told.runs) runs.set(row.name, row);
  } catch (error) {
    trouble = error.message;
  }
  tell("runs", null);
}

function patch({ runs: changed, gone }) {
  for (const row of changed) runs.set(row.name, row);
  for (const name of gone) runs.delete(name);
  tell("runs", new Set(changed.map((row) => row.name)));
}

function state(now) {
  connection = now;
  tell("connection", now);
}

function tell(kind, detail) {
  news.dispatchEvent(new CustomEvent(kind, { detail }));
}
