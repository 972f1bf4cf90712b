// The samples of a run: one checkpoint with a slider over training, or every prompt over all checkpoints; compared with another run's.

import { askRuns, choice, choose, count, element, framed, joined, nameOf, redraw, thumbAddress } from "./tools.js";
import { state, writeAddress } from "./state.js";
import { NOTHING, compareMenu, noteOf } from "./list.js";
import { enlarge } from "./viewer.js";

const NO_SAMPLES = { prompts: [], steps: [], files: [], errors: [] };
const GAP = 6; // pixels between images, as in board.css
let page = null;
const samplesOf = new Map(); // by run

export const samples = {
  open(view) {
    const mode = choice("Show", [["one", "one checkpoint"], ["all", "all checkpoints"]], state.allSteps ? "all" : "one", (value) => showAll(value === "all"));
    const compare = compareMenu(() => samples.poll(page.overview));
    const slider = element("input", { type: "range", min: 0, step: 1, "aria-label": "Checkpoint", oninput: () => setPlace(Number(slider.value)) });
    const round = (label, text, onclick) => element("button.round", { type: "button", "aria-label": label, onclick }, text);
    const play = round("Play", "▶", toggle);
    const where = element("output");
    const track = element("div.track", {}, play, round("Checkpoint before", "‹", () => step(-1)), slider, round("Checkpoint after", "›", () => step(1)), where);
    const [sides, note, errors, tiles] = [element("p.sides"), element("p.note"), element("div.errors"), element("div.tiles")];
    const all = element("div.sample-grid", { tabIndex: 0, role: "group", "aria-label": "Prompts by checkpoints", onscroll: drawCells });
    const watcher = new ResizeObserver(drawCells);
    watcher.observe(all);
    page = { mode, compare, slider, play, where, track, sides, note, errors, tiles, all, watcher, cells: new Map(), place: 0, following: state.step === null, overview: null, run: null, timer: null };
    view.replaceChildren(element("div.tools", {}, mode, compare), track, sides, errors, note, tiles, all);
  },
  close() {
    clearInterval(page.timer);
    page.watcher.disconnect();
    page = null;
  },
  async poll(overview) {
    const opened = page;
    page.overview = overview;
    page.compare.update(overview);
    const wanted = [state.focus.run, state.beside].filter((id) => id !== null && overview.run.some((run) => run.id === id));
    const changed = await askRuns("samples", wanted, samplesOf);
    if (page !== opened) return;
    if (changed) page.drawn = "";
    redraw(page, [state.focus.run, state.beside], refresh);
  },
  key(key) {
    if (key === "ArrowLeft") step(-1);
    else if (key === "ArrowRight") step(1);
    else if (key === "p") toggle();
    else if (key === "w") showAll(!state.allSteps);
    else return false;
    return true;
  },
};

const main = () => samplesOf.get(state.focus.run) ?? NO_SAMPLES;
const other = () => (state.beside && state.beside !== state.focus.run ? samplesOf.get(state.beside) : undefined);
const shortName = (id) => nameOf(id, page.overview.name)[1];

function showAll(all) {
  state.allSteps = all;
  choose(page.mode, all ? "all" : "one");
  writeAddress();
  refresh();
}

/** Redraw everything after the samples, the run or the mode changed. */
function refresh() {
  const { steps, prompts, errors } = main();
  const isNewRun = page.run !== state.focus.run;
  if (isNewRun) [page.run, page.following] = [state.focus.run, state.step === null];
  const last = Math.max(0, steps.length - 1);
  page.place = page.following ? last : nearest(steps, state.step ?? steps[last] ?? 0);
  page.slider.max = last;
  page.track.hidden = !steps.length || state.allSteps;
  page.note.replaceChildren(...noteOf(state.focus.run === null ? NOTHING.run : steps.length ? "" : "No samples yet: they come with the first checkpoint."));
  page.errors.replaceChildren(...errors.slice(-3).map((error) => element("p.warning", {}, `Step ${count(error.step)}, GPU ${error.gpu}: `, ...noteOf(error.reason))));
  page.tiles.hidden = state.allSteps;
  page.all.hidden = !state.allSteps || !steps.length;
  page.tiles.classList.toggle("pairs", Boolean(other()));
  page.tiles.replaceChildren(...(state.allSteps ? [] : prompts.map((prompt, row) => element("figure.tile", {}, imageButton(row), element("figcaption", { title: prompt }, prompt)))));
  drawAll(isNewRun);
  drawPlace();
}

/** Draw all checkpoints: rows are prompts, columns are steps. */
function drawAll(isNewRun) {
  const { steps, prompts } = state.allSteps ? main() : NO_SAMPLES;
  const { scrollLeft, clientWidth, scrollWidth } = page.all;
  const atEnd = isNewRun || scrollLeft + clientWidth > scrollWidth - 8;
  page.cells.clear();
  page.all.style.cssText = `--rows: ${prompts.length}; --columns: ${steps.length}; --images: ${other() ? 2 : 1}`;
  page.all.replaceChildren(element("i"),
    ...steps.map((step, column) => element("span", { style: `grid-column: ${column + 2}` }, count(step))),
    ...prompts.map((prompt, row) => element("p", { title: prompt, style: `grid-row: ${row + 2}` }, element("span", {}, prompt))));
  if (atEnd) page.all.scrollLeft = page.all.scrollWidth; // the newest are at the end
  drawCells();
}

/** Among all checkpoints, only the images near the screen exist. */
const drawCells = framed(() => {
  if (!page?.all.querySelector("p")) return;
  const { steps, prompts } = main();
  const { scrollLeft, clientWidth, scrollTop, clientHeight } = page.all;
  const range = (from, length, size, most) => [Math.max(0, Math.floor(from / (size + GAP)) - 2), Math.min(most, Math.ceil((from + length) / (size + GAP)) + 2)];
  const columns = range(scrollLeft, clientWidth, page.all.querySelector("span").offsetWidth, steps.length);
  const rows = range(scrollTop, clientHeight, page.all.querySelector("p").offsetHeight, prompts.length);
  const unwanted = new Set(page.cells.keys());
  for (let row = rows[0]; row < rows[1]; row += 1) {
    for (let column = columns[0]; column < columns[1]; column += 1) {
      const key = `${row + 2} / ${column + 2}`;
      if (unwanted.delete(key)) continue;
      const cell = imageButton(row, column);
      cell.style.gridArea = key;
      fill(cell, row, column);
      page.cells.set(key, cell);
      page.all.append(cell);
    }
  }
  for (const key of unwanted) {
    page.cells.get(key).remove();
    page.cells.delete(key);
  }
});

const nearest = (steps, step) => steps.reduce((best, one, place) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? place : best), 0);

function setPlace(place) {
  const { steps } = main();
  if (!steps.length) return;
  page.place = Math.max(0, Math.min(steps.length - 1, place));
  page.following = page.place === steps.length - 1;
  state.step = page.following ? null : steps[page.place];
  writeAddress();
  drawPlace();
}

const step = (by) => setPlace(page.place + by);

function toggle() {
  if (page.timer) {
    clearInterval(page.timer);
    page.timer = null;
  } else {
    if (page.place === main().steps.length - 1) setPlace(0);
    page.timer = setInterval(() => {
      step(1);
      if (page.following) toggle();
    }, 450);
  }
  page.play.textContent = page.timer ? "❚❚" : "▶";
  page.play.setAttribute("aria-label", page.timer ? "Pause" : "Play");
}

/** Show the images of the chosen checkpoint in the existing tiles. */
const drawPlace = framed(() => {
  if (!page) return;
  const { steps } = main();
  page.slider.value = page.place;
  page.slider.setAttribute("aria-valuetext", `step ${steps[page.place]}`);
  page.where.textContent = steps.length ? `step ${count(steps[page.place])} · ${page.place + 1} of ${steps.length}` : "";
  const second = other();
  const words = state.allSteps ? ["above", "below"] : ["left", "right"];
  const side = (word, id, step) => [`${word}: `, element("b", {}, shortName(id)), state.allSteps ? "" : `, step ${count(step)}`];
  page.sides.replaceChildren(...(second?.steps.length && steps.length ? [
    ...side(words[0], state.focus.run, steps[page.place]), " · ",
    ...side(words[1], state.beside, second.steps[nearest(second.steps, steps[page.place])]),
    main().prompts.some((one) => second.prompts.includes(one)) ? "" : ", which has none of these prompts",
  ] : []));
  [...page.tiles.children].forEach((tile, row) => fill(tile.firstElementChild, row, page.place));
});

const imageButton = (row, column = null) => element("button", {
  type: "button", "aria-label": `Enlarge: ${main().prompts[row]}`, onclick: () => open(row, column ?? page.place),
});

/** Return the other run's row with the same prompt; repeated prompts are paired in order. */
function sameRow(prompts, row) {
  const own = main().prompts;
  const turn = own.slice(0, row).filter((one) => one === own[row]).length;
  return prompts.flatMap((one, at) => (one === own[row] ? [at] : []))[turn] ?? -1;
}

/** Return the image paths of a prompt at a checkpoint: of this run, and of the other run at the nearest step.
    Among all checkpoints, an image of the other run appears once. */
function imagesAt(row, place) {
  const found = [{ run: state.focus.run, samples: main(), row, place }];
  const second = other();
  if (second) {
    const { steps } = main();
    const near = nearest(second.steps, steps[place]);
    const isShown = !state.allSteps || nearest(steps, second.steps[near]) === place;
    found.push({ run: state.beside, samples: second, row: isShown ? sameRow(second.prompts, row) : -1, place: near });
  }
  return found.map(({ run, samples: of, row: at, place: column }) => {
    const file = of.files[column]?.[at];
    const step = of.steps[column];
    return { run, step, path: file ? joined(run, "samples", `step_${String(step).padStart(7, "0")}`, file) : null };
  });
}

/** Show the images of a prompt at a checkpoint in a button. */
function fill(button, row, place) {
  const wanted = imagesAt(row, place);
  while (button.children.length > wanted.length) button.lastElementChild.remove();
  wanted.forEach(({ path }, number) => {
    let image = button.children[number];
    if (!image) {
      image = element("img", { alt: "", decoding: "async", loading: "lazy", onload: () => image.classList.toggle("pixels", image.naturalWidth <= 64) });
      button.append(image);
    }
    image.classList.toggle("absent", !path);
    const address = path ? thumbAddress(path, state.allSteps ? 192 : 384) : "data:,";
    if (image.getAttribute("src") !== address) image.src = address;
  });
}

function open(row, place) {
  enlarge({
    at([line, column]) {
      const { prompts, steps } = main();
      const found = imagesAt(line, column).filter((one) => one.path);
      if (!found.length) return null;
      return {
        images: found.map((one) => ({ path: one.path, thumb: thumbAddress(one.path, 384), label: other() ? `${shortName(one.run)}, step ${count(one.step)}` : null })),
        prompt: prompts[line],
        facts: [`step ${count(steps[column])}`, `checkpoint ${column + 1} of ${steps.length}`],
      };
    },
    move([line, column], x, y) {
      const { prompts, steps, files } = main();
      const [nextLine, nextColumn] = [line + y, column + x];
      if (nextLine < 0 || nextLine >= prompts.length || nextColumn < 0 || nextColumn >= steps.length) return null;
      return files[nextColumn][nextLine] ? [nextLine, nextColumn] : this.move([nextLine, nextColumn], x, y);
    },
    closed([, column]) { if (!state.allSteps) setPlace(column); },
  }, [row, place]);
}
