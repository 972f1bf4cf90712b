// Grids of which only the part near the screen exists: tiles in rows, and samples by prompt and checkpoint.

import { count, element, framed, joined, thumbAddress } from "./tools.js";

const MAX_HEIGHT = 15_000_000; // pixels; browsers draw no taller page
const BEYOND = 400; // pixels around the screen

export class TileGrid {
  /** `tile(index)` creates a tile; `least` is its minimum width, `shape` returns its height for a width. */
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

  /** Show this many tiles; `anew`: replace existing ones. */
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
    const rows = Math.min(Math.ceil(this.count / columns), Math.floor(MAX_HEIGHT / height));
    const layout = `${columns} ${side}`;
    if (layout !== this.layout) {
      this.layout = layout;
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
    const created = document.createDocumentFragment();
    for (let index = first; index < last; index += 1) {
      if (this.tiles.has(index)) continue;
      const tile = this.tile(index, side);
      tile.style.cssText = `position:absolute;width:${side}px;left:${(index % columns) * (side + this.gap)}px;top:${Math.floor(index / columns) * height}px`;
      this.tiles.set(index, tile);
      created.append(tile);
    }
    this.element.append(created);
    [this.first, this.last, this.columns] = [first, last, columns];
    this.onrange?.(first, last);
  }
}

const GAP = 6;
const HEAD = 30;
const CELLS_BEYOND = 2; // the screen

/** All checkpoints at once: rows are prompts, columns are steps; only cells near the screen exist. */
export class SampleGrid {
  /** `cell(row, column)` is called when an image is clicked. */
  constructor({ cell, side }) {
    Object.assign(this, { cell, side, samples: null, parts: new Map() });
    this.space = element("div.space");
    this.head = element("div.head");
    this.element = element("div.sample-grid", { tabIndex: 0, role: "group", "aria-label": "Prompts by checkpoints" }, this.space);
    this.draw = framed(() => this.#draw());
    this.element.addEventListener("scroll", this.draw, { passive: true });
    this.watcher = new ResizeObserver(this.draw);
    this.watcher.observe(this.element);
  }

  close() {
    this.watcher.disconnect();
  }

  show(samples) {
    const first = this.samples?.run !== samples.run;
    this.samples = samples;
    this.parts.clear();
    this.head.replaceChildren(element("i"));
    this.space.replaceChildren(this.head);
    this.draw();
    if (first) requestAnimationFrame(() => { this.element.scrollLeft = this.element.scrollWidth; }); // the newest are at the end
  }

  #draw() {
    if (!this.samples || !this.element.clientWidth) return;
    const { prompts, steps } = this.samples;
    const [pitch, label] = [this.side + GAP, this.element.clientWidth < 620 ? 96 : 200];
    this.element.style.setProperty("--label", `${label}px`);
    this.space.style.width = `${label + GAP + steps.length * pitch}px`;
    this.space.style.height = `${HEAD + prompts.length * pitch}px`;
    const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.element;
    const columns = range(scrollLeft - label, clientWidth, pitch, steps.length);
    const rows = range(scrollTop - HEAD, clientHeight, pitch, prompts.length);
    const wanted = new Map();
    for (let column = columns[0]; column < columns[1]; column += 1) {
      wanted.set(`step ${column}`, () => this.#step(column, label + GAP + column * pitch));
    }
    for (let row = rows[0]; row < rows[1]; row += 1) {
      wanted.set(`row ${row}`, () => this.#row(row, HEAD + row * pitch));
    }
    for (const [key, part] of this.parts) {
      if (!wanted.has(key)) {
        part.remove();
        this.parts.delete(key);
      }
    }
    for (const [key, make] of wanted) if (!this.parts.has(key)) this.parts.set(key, make());
    for (let row = rows[0]; row < rows[1]; row += 1) this.#cells(this.parts.get(`row ${row}`), row, columns, label + GAP, pitch);
  }

  #step(column, left) {
    const made = element("span", { style: `left:${left}px;width:${this.side}px` }, count(this.samples.steps[column]));
    this.head.append(made);
    return made;
  }

  #row(row, top) {
    const prompt = this.samples.prompts[row];
    const made = element("div.line", { style: `top:${top}px;height:${this.side}px` }, element("p", { title: prompt }, element("span", {}, prompt)));
    made.cells = new Map();
    this.space.append(made);
    return made;
  }

  #cells(line, row, columns, left, pitch) {
    for (const [column, cell] of line.cells) {
      if (column < columns[0] || column >= columns[1]) {
        cell.remove();
        line.cells.delete(column);
      }
    }
    for (let column = columns[0]; column < columns[1]; column += 1) {
      const file = this.samples.files[column][row];
      if (line.cells.has(column) || !file) continue;
      const step = this.samples.steps[column];
      const path = joined(this.samples.run, "samples", `step_${String(step).padStart(7, "0")}`, file);
      const cell = element("button", {
        type: "button", style: `left:${left + column * pitch}px;width:${this.side}px`, tabIndex: -1,
        "aria-label": `Step ${step}: ${this.samples.prompts[row]}`, onclick: () => this.cell(row, column),
      }, element("img", { src: thumbAddress(path, 192), alt: "", decoding: "async" }));
      line.cells.set(column, cell);
      line.append(cell);
    }
  }
}

function range(from, length, pitch, most) {
  const first = Math.max(0, Math.floor(from / pitch) - CELLS_BEYOND);
  return [Math.min(first, most), Math.min(most, Math.ceil((from + length) / pitch) + CELLS_BEYOND)];
}
