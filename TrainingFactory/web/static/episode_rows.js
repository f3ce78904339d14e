// The rows of a run's episodes, read page by page as they come into sight.
import { get, url } from "./api.js";

const PAGE = 100;

export class EpisodeRows {
  /** `changed` is called when there is more to show. */
  constructor(name, filter, signal, changed) {
    this.end = new AbortController();
    Object.assign(this, { name, filter, changed, signal: AbortSignal.any([signal, this.end.signal]) });
    this.rows = []; // by place in the list; holes are not read yet
    this.pages = new Map(); // number of a page -> the promise of its reading
    this.total = 0;
    this.matched = null; // not known while a text is looked for
    this.next = null; // where the page after the last one begins
    this.ended = false;
    this.building = true; // the server has not yet looked at the whole file
    this.indexed = 0; // the share of it that it knows
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

  /** Reads the first page, and again as long as the server has not yet looked at the whole file. */
  async begin() {
    const { text, down } = this.filter;
    do {
      if (!this.direct || down) this.forget(); // another order may come of what is new
      this.pages.set(0, Promise.resolve());
      await this.read(null, 0, text ? { limit: 1, text: "" } : {}); // a text is looked for when every line is known
      if (this.building || !text) this.changed();
    } while (this.building);
    if (!text || this.error) return;
    this.forget();
    await this.read(null, 0);
    this.changed();
  }

  forget() {
    this.rows = [];
    this.pages.clear();
    this.matched = null;
  }

  need(from, to) {
    if (this.direct) {
      for (let page = Math.floor(from / PAGE); page * PAGE < to; page += 1) this.readPage(page);
    } else if (
      to >= this.rows.length &&
      this.next !== null &&
      !this.building &&
      !this.reading &&
      this.error === null
    ) {
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

  async read(after, place = this.rows.length, more = {}) {
    try {
      const told = await get(
        url(["runs", this.name, "episodes"], { ...this.filter, after, limit: PAGE, ...more }),
        this.signal,
      );
      told.rows.forEach((row, at) => (this.rows[place + at] = row));
      this.total = told.total;
      if (told.matched !== null) this.matched = told.matched;
      this.next = told.next;
      this.indexed = told.size ? told.indexed / told.size : 1;
      this.building = told.partial && !(more.text ?? this.filter.text);
      this.ended = told.next === null && !this.building;
    } catch (error) {
      this.building = false;
      if (error.name !== "AbortError") this.error = error;
    }
  }
}
