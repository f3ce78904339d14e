// Formats of numbers, times and sizes.

const NONE = "–";

/** Writes a number with about four digits: 0.5156, 12.3, 18,121, 1.1e-6. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
  if (size < 1e-3 || size >= 1e9) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits - (size >= 100 ? 0 : 1))));
}

/** Writes a signed number: +0.25. */
export function signed(value, digits = 3) {
  return value === null || value === undefined ? NONE : (value > 0 ? "+" : "") + number(value, digits + 1);
}

/** Writes a share as percent: 51.6%. */
export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const told = value * 100;
  return (Math.abs(told) >= 99.95 || told === 0 ? told.toFixed(0) : told.toFixed(1)) + "%";
}

/** Writes a duration: 0.12 s, 48 s, 4m 03s, 2h 05m, 3d 4h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0.0995) return Math.round(seconds * 1000) + " ms";
  if (seconds < 10) return seconds.toFixed(seconds < 1 ? 2 : 1) + " s";
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + "m " + two(whole % 60) + "s";
  if (whole < 86400) return Math.floor(whole / 3600) + "h " + two(Math.floor((whole % 3600) / 60)) + "m";
  return Math.floor(whole / 86400) + "d " + Math.floor((whole % 86400) / 3600) + "h";
}

/** Formats how long ago a moment was: just now, 5 min, 3 h, 12 d. */
export function ago(unix) {
  if (!unix) return NONE;
  const seconds = Date.now() / 1000 - unix;
  if (seconds < 10) return "just now";
  if (seconds < 60) return Math.floor(seconds) + " s ago";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min ago";
  if (seconds < 86400) return Math.floor(seconds / 3600) + " h ago";
  return Math.floor(seconds / 86400) + " d ago";
}

/** Formats a moment in the browser's time zone. */
export function moment(value) {
  const date = typeof value === "number" ? new Date(value * 1000) : new Date(value);
  if (Number.isNaN(date.getTime())) return String(value ?? NONE);
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
  return day + ", " + date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

/** Writes a size in bytes. */
export function bytes(count) {
  if (count < 1000) return count + " B";
  const units = ["kB", "MB", "GB", "TB"];
  let value = count;
  let unit = -1;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return value.toFixed(value < 10 ? 1 : 0) + " " + units[unit];
}

/** Writes a value of the config in one line. */
export function plain(value) {
  if (value === null || value === undefined) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Formats the source of a held-out success: its step, and the command if the run did not evaluate itself. */
export function measured({ step, by }) {
  return "step " + number(step) + (by === "training" ? "" : ", " + by);
}

/** Formats the task of an episode, with the number of its group if a step has several groups of the task: t-7#2. */
export function taskOf({ task, group }) {
  const name = group.slice(group.indexOf("/") + 1);
  return name.startsWith(task) ? name : task;
}

/** Writes a count with its noun: 1 run, 3 runs. */
export function counted(count, noun) {
  return number(count) + " " + noun + (count === 1 ? "" : "s");
}
