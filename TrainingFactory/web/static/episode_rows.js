// The rows of a run's episodes, read page by page as they come into sight.
import { get, url } from "./api.js";

const PAGE = 100;

export class EpisodeRows {
  /** `changed` is called when there is more to show. */
  constructor(name, filter, signal, changed) {
    Object.assign(this, { name, filter, signal, changed });
    this.rows = []; // by place in the list; holes are not read yet
    this.pages = new Map(); // number of a page -> the promise of its reading
    this.total = 0;
    this.matched = null; // not known while a text is looked for
    this.next = null; // where the page after the last one begins
    this.ended = false;
    this.error = null;
  }

  /** In the order of the file and without a filter any page can be read at once; else one follows the other. */
  get direct() {
    const { sort, down: _, ...rest } = this.filter;
    return (!sort || sort === "place") && Object.values(rest).every((value) => !value);
  }

  /** How many rows the list has: all that fit, or those that are read and a hint that there are more. */
  get count() {
    if (this.direct) return this.total;
    if (this.ended) return this.rows.length;
    return this.matched ?? this.rows.length + 1;
  }

  async begin() {
    this.pages.set(0, this.read(null));
    await this.pages.get(0);
    if (this.direct) for (let at = 0; at < this.rows.length; at += PAGE) this.pages.set(at / PAGE, Promise.resolve());
  }

  need(from, to) {
    if (this.direct) {
      for (let page = Math.floor(from / PAGE); page * PAGE < to; page += 1) this.readPage(page);
    } else if (to >= this.rows.length && !this.ended && !this.reading && this.error === null) {
      this.reading = this.read(this.next).finally(() => {
        this.reading = null;
        this.changed();
      });
    }
  }

  readPage(page) {
    if (this.pages.has(page)) return;
    const at = this.filter.down ? this.total + 1 - page * PAGE : page * PAGE;
    const read = this.read(`${at}:${at}`, page * PAGE).then(this.changed);
    this.pages.set(page, read);
  }

  async read(after, place = this.rows.length) {
    try {
      const told = await get(url(["runs", this.name, "episodes"], { ...this.filter, after, limit: PAGE }), this.signal);
      told.rows.forEach((row, at) => (this.rows[place + at] = row));
      this.total = told.total;
      if (told.matched !== null) this.matched = told.matched;
      this.next = told.next;
      this.partial = told.partial;
      this.ended = told.next === null && !told.partial;
    } catch (error) {
      if (error.name !== "AbortError") this.error = error;
    }
  }
}
