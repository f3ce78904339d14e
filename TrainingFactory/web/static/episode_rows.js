// The rows of a run's episodes, fetched page by page as they scroll into view.
import { get, url } from "./api.js";

const PAGE = 100;

export class EpisodeRows {
  /** `changed` is called when there is more to show. */
  constructor(name, filter, signal, changed) {
    this.end = new AbortController();
    Object.assign(this, { name, filter, changed, signal: AbortSignal.any([signal, this.end.signal]) });
    this.rows = []; // by index in the list; holes are not fetched yet
    this.pages = new Map(); // page number -> promise of its fetch
    this.total = 0;
    this.matched = null; // null during a text search
    this.next = null; // `after` of the next page
    this.ended = false;
    this.building = true; // the server has not indexed the whole file yet
    this.indexed = 0; // indexed share of the file
    this.error = null;
  }

  /** Whether any page can be fetched directly: in file order and without a filter. Otherwise pages follow each other. */
  get direct() {
    const { sort, down: _, ...rest } = this.filter;
    return (!sort || sort === "place") && Object.values(rest).every((value) => !value);
  }

  /** Length of the list: all matching rows if known, else the fetched rows and a placeholder. */
  get count() {
    if (this.direct) return this.total;
    if (this.ended) return this.rows.length;
    return this.matched ?? this.rows.length + 1;
  }

  /** Fetches the first page, repeatedly until the server has indexed the whole file. */
  async begin() {
    const { text, down } = this.filter;
    do {
      if (!this.direct || down) this.forget(); // new rows may change the order
      this.pages.set(0, Promise.resolve());
      await this.read(null, 0, text ? { limit: 1, text: "" } : {}); // a text search starts once every line is indexed
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
