// Exports: tables as CSV and charts as PNG, made on the page.
import { number } from "./format.js";

/** Saves a blob as a file. */
export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Writes a cell of a CSV file. A text that a spreadsheet would run as a formula gets an apostrophe in front. */
function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? "'" + text : text;
  return /[",\n\r]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
}

/** Saves rows, the first of which are the heads, as a CSV file. */
export function downloadCsv(name, rows) {
  const text = rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
  download(name + ".csv", new Blob([text], { type: "text/csv;charset=utf-8" }));
}

/** Turns a title into a part of a file name. */
export function fileName(...parts) {
  const joined = parts.filter(Boolean).join("-");
  return joined.replace(/[^\p{L}\p{N}.+-]+/gu, "-").replace(/^[-.]+|-+$/g, "") || "export";
}

/** Saves a chart with its title and legend; `lines` are [{label, value, colour}], `colours` {back, text, soft}. */
export function downloadPng(name, { title, lines, plot, colours, font }) {
  const source = plot.ctx.canvas;
  const scale = source.width / plot.width;
  const keys = lines.length > 1 ? lines : [];
  const head = 30 + (keys.length ? 20 : 0);
  const made = document.createElement("canvas");
  made.width = source.width + 24 * scale;
  made.height = source.height + (head + 12) * scale;
  const draw = made.getContext("2d");
  draw.scale(scale, scale);
  draw.fillStyle = colours.back;
  draw.fillRect(0, 0, made.width, made.height);
  draw.fillStyle = colours.text;
  draw.font = "600 14px " + font;
  draw.fillText(title, 12, 21);
  draw.font = "12px " + font;
  let x = 12;
  for (const { label, value, colour } of keys) {
    draw.fillStyle = colour;
    draw.fillRect(x, 36, 12, 2.5);
    draw.fillStyle = colours.soft;
    const text = label + " " + number(value);
    draw.fillText(text, x + 17, 41);
    x += 35 + draw.measureText(text).width;
  }
  draw.drawImage(source, 12, head, plot.width, plot.height);
  made.toBlob((blob) => download(name + ".png", blob));
}
