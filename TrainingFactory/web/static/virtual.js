// A virtual list: only visible rows exist in the DOM. Rows are fetched in pages.
import { h, put } from "./dom.js";

const AHEAD = 12; // rows rendered beyond the visible ones

export class VirtualList {
  /** `rowOf(index)` returns a row, or null if it is not fetched yet; `need(from, to)` requests it. */
  constructor({ label, height, rowOf, need }) {
    Object.assign(this, { height, rowOf, need, count: 0 });
    this.inner = h("div", { class: "rows" });
    this.element = h(
      "div",
      { class: "virtual", role: "listbox", tabindex: "0", "aria-label": label },
      this.inner,
    );
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  resize(count) {
    this.count = count;
    this.inner.style.height = count * this.height + "px";
    this.draw();
  }

  draw() {
    const top = this.element.scrollTop;
    const from = Math.max(0, Math.floor(top / this.height) - AHEAD);
    const to = Math.min(this.count, Math.ceil((top + this.element.clientHeight) / this.height) + AHEAD);
    if (to > from) this.need(from, to);
    const rows = [];
    for (let at = from; at < to; at += 1) {
      const row = this.rowOf(at) ?? h("div", { class: "row unread", "aria-hidden": "true" }, "…");
      row.style.transform = `translateY(${at * this.height}px)`;
      row.setAttribute("aria-setsize", this.count);
      row.setAttribute("aria-posinset", at + 1);
      rows.push(row);
    }
    put(this.inner, rows);
  }

  reveal(at) {
    const { scrollTop, clientHeight } = this.element;
    if (at * this.height < scrollTop) this.element.scrollTop = at * this.height;
    else if ((at + 1) * this.height > scrollTop + clientHeight)
      this.element.scrollTop = (at + 1) * this.height - clientHeight;
  }

  top() {
    this.element.scrollTop = 0;
  }
}
