// All checkpoints at once: rows are prompts, columns are steps; only the part that is on the screen exists.

import { count, element, framed, joined, thumbAddress } from "./tools.js";

const GAP = 6;
const HEAD = 30;
const BEYOND = 2;

export class Wall {
  /** `cell(row, column)` is called when a picture is clicked. */
  constructor({ cell, side }) {
    Object.assign(this, { cell, side, wall: null, parts: new Map() });
    this.space = element("div.space");
    this.head = element("div.head");
    this.element = element("div.wall", { tabIndex: 0, role: "group", "aria-label": "Prompts by checkpoints" }, this.space);
    this.draw = framed(() => this.#draw());
    this.element.addEventListener("scroll", this.draw, { passive: true });
    this.watcher = new ResizeObserver(this.draw);
    this.watcher.observe(this.element);
  }

  close() {
    this.watcher.disconnect();
  }

  show(wall) {
    const first = this.wall?.run !== wall.run;
    this.wall = wall;
    this.parts.clear();
    this.head.replaceChildren(element("i"));
    this.space.replaceChildren(this.head);
    this.draw();
    if (first) requestAnimationFrame(() => { this.element.scrollLeft = this.element.scrollWidth; }); // the newest are at the end
  }

  #draw() {
    if (!this.wall || !this.element.clientWidth) return;
    const { prompts, steps } = this.wall;
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
    const made = element("span", { style: `left:${left}px;width:${this.side}px` }, count(this.wall.steps[column]));
    this.head.append(made);
    return made;
  }

  #row(row, top) {
    const prompt = this.wall.prompts[row];
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
      const file = this.wall.files[column][row];
      if (line.cells.has(column) || !file) continue;
      const step = this.wall.steps[column];
      const path = joined(this.wall.run, "samples", `step_${String(step).padStart(7, "0")}`, file);
      const cell = element("button", {
        type: "button", style: `left:${left + column * pitch}px;width:${this.side}px`, tabIndex: -1,
        "aria-label": `Step ${step}: ${this.wall.prompts[row]}`, onclick: () => this.cell(row, column),
      }, element("img", { src: thumbAddress(path, 192), alt: "", decoding: "async" }));
      line.cells.set(column, cell);
      line.append(cell);
    }
  }
}

function range(from, length, pitch, most) {
  const first = Math.max(0, Math.floor(from / pitch) - BEYOND);
  return [Math.min(first, most), Math.min(most, Math.ceil((from + length) / pitch) + BEYOND)];
}
