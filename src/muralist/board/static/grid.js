// A grid of any number of tiles of which only those near the screen exist.

import { element, framed } from "./tools.js";

const TALLEST = 15_000_000; // pixels; browsers draw no taller page
const BEYOND = 400;

export class Grid {
  /** `tile(index)` makes a tile; `least` is its least width, `shape` its height for a width. */
  constructor({ tile, least, shape, gap = 12 }) {
    Object.assign(this, { tile, least, shape, gap });
    this.element = element("div.grid");
    this.tiles = new Map();
    this.count = 0;
    this.draw = framed(() => this.#draw());
    this.watcher = new ResizeObserver(this.draw);
    this.watcher.observe(this.element);
    addEventListener("scroll", this.draw, { passive: true });
  }

  close() {
    this.watcher.disconnect();
    removeEventListener("scroll", this.draw);
  }

  /** Show so many; with `anew`, those that exist are made again. */
  show(count, anew = false) {
    this.count = count;
    if (anew) this.#clear();
    this.draw();
  }

  #clear() {
    this.tiles.clear();
    this.element.replaceChildren();
  }

  #draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const columns = Math.max(width < 520 ? 2 : 1, Math.floor((width + this.gap) / (this.least + this.gap)));
    const side = (width - (columns - 1) * this.gap) / columns;
    const height = this.shape(side) + this.gap;
    const rows = Math.min(Math.ceil(this.count / columns), Math.floor(TALLEST / height));
    const measure = `${columns} ${side}`;
    if (measure !== this.measure) {
      this.measure = measure;
      this.#clear();
    }
    this.element.style.height = `${Math.max(0, rows * height - this.gap)}px`;
    const top = -this.element.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor((top - BEYOND) / height)) * columns;
    const last = Math.min(this.count, rows * columns, (Math.ceil((top + innerHeight + BEYOND) / height)) * columns);
    for (const [index, tile] of this.tiles) {
      if (index < first || index >= last) {
        tile.remove();
        this.tiles.delete(index);
      }
    }
    const made = document.createDocumentFragment();
    for (let index = first; index < last; index += 1) {
      if (this.tiles.has(index)) continue;
      const tile = this.tile(index, side);
      tile.style.cssText = `position:absolute;width:${side}px;left:${(index % columns) * (side + this.gap)}px;top:${Math.floor(index / columns) * height}px`;
      this.tiles.set(index, tile);
      made.append(tile);
    }
    this.element.append(made);
    [this.first, this.last, this.columns] = [first, last, columns];
    this.onrange?.(first, last);
  }
}
