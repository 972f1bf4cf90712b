// The samples of a run: one checkpoint with a slider over training, or all checkpoints; beside another run's.

import { ask, choice, choose, count, element, framed, joined, nameOf, thumbAddress } from "./tools.js";
import { state, writeAddress } from "./state.js";
import { NOTHING } from "./list.js";
import { SampleGrid, TileGrid } from "./grids.js";
import { enlarge } from "./viewer.js";

const LEAST = [220, 300]; // pixels of a tile, alone and with another run's image in it
let page = null;
const samplesOf = new Map(); // by run

export const samples = {
  open(view) {
    const mode = choice("Show", [["one", "one checkpoint"], ["all", "all checkpoints"]], state.allSteps ? "all" : "one", (value) => showAll(value === "all"));
    const beside = element("select", { "aria-label": "Beside", onchange: () => { state.beside = beside.value || null; writeAddress(); refresh(); } });
    const slider = element("input", { type: "range", min: 0, step: 1, "aria-label": "Checkpoint", oninput: () => setPlace(Number(slider.value)) });
    const before = element("button.round", { type: "button", "aria-label": "Checkpoint before", onclick: () => step(-1) }, "‹");
    const after = element("button.round", { type: "button", "aria-label": "Checkpoint after", onclick: () => step(1) }, "›");
    const play = element("button.round", { type: "button", "aria-label": "Play", title: "Play (p)", onclick: toggle }, "▶");
    const where = element("output");
    const track = element("div.track", {}, play, before, slider, after, where);
    const sides = element("p.sides");
    const note = element("p.note");
    const errors = element("div.errors");
    const grid = new TileGrid({ tile: (row) => tile(row), least: LEAST[0], shape: (side) => side * page.aspect + 50, gap: 16 });
    const all = new SampleGrid({ cell: (row, column) => open(row, column), side: innerWidth < 520 ? 84 : 112 });
    page = { mode, beside, slider, play, where, track, sides, note, errors, grid, all, place: 0, following: state.step === null, overview: null, run: null, timer: null, aspect: 1, drawn: "" };
    view.replaceChildren(element("div.tools", {}, mode, element("label", {}, "beside", beside)), track, sides, errors, note, grid.element, all.element);
  },
  close() {
    clearInterval(page.timer);
    page.grid.close();
    page.all.close();
    page = null;
  },
  async poll(overview) {
    const opened = page;
    page.overview = overview;
    drawBeside();
    const wanted = [state.focus.run, state.beside].filter((id) => id !== null && overview.run.some((run) => run.id === id));
    const changed = await Promise.all(wanted.map(async (id) => {
      const news = await ask("samples", { run: id }, `samples ${id}`);
      if (news) samplesOf.set(id, news);
      return Boolean(news);
    }));
    if (page !== opened) return;
    const content = JSON.stringify([state.focus.run, state.beside, state.allSteps]);
    if (changed.some(Boolean) || content !== page.drawn) {
      page.drawn = content;
      refresh();
    }
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

const main = () => samplesOf.get(state.focus.run) ?? { prompts: [], steps: [], files: [], errors: [] };
const other = () => (state.beside && state.beside !== state.focus.run ? samplesOf.get(state.beside) : undefined);

function showAll(all) {
  state.allSteps = all;
  choose(page.mode, all ? "all" : "one");
  writeAddress();
  refresh();
}

/** Redraw everything after the samples, the run or the mode changed. */
function refresh() {
  const { steps, prompts, errors } = main();
  if (state.beside && !samplesOf.has(state.beside)) {
    samples.poll(page.overview);
    return;
  }
  if (page.run !== state.focus.run) [page.run, page.following] = [state.focus.run, state.step === null];
  const last = Math.max(0, steps.length - 1);
  page.place = page.following ? last : nearest(steps, state.step ?? steps[last] ?? 0);
  page.slider.max = last;
  page.track.hidden = !steps.length || state.allSteps;
  page.note.textContent = state.focus.run === null ? NOTHING.run
    : steps.length ? "" : "No samples yet: they come with the first checkpoint.";
  page.errors.replaceChildren(...errors.slice(-3).map((error) => element("p.warning", {}, `Step ${count(error.step)}, GPU ${error.gpu}: ${error.reason}`)));
  page.grid.element.hidden = state.allSteps;
  page.all.element.hidden = !state.allSteps;
  page.beside.disabled = state.allSteps;
  if (state.allSteps) page.all.show({ ...main(), run: state.focus.run });
  page.grid.least = LEAST[other() ? 1 : 0] * (innerWidth < 520 ? 0.7 : 1);
  page.grid.show(state.allSteps ? 0 : prompts.length, true);
  drawPlace();
}

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
  const side = (word, id, step) => [element("span", {}, `${word}: `), element("b", {}, nameOf(id, page.overview.name)[1]), `, step ${count(step)}`];
  page.sides.replaceChildren(...(second?.steps.length && steps.length && !state.allSteps ? [
    ...side("left", state.focus.run, steps[page.place]), " · ",
    ...side("right", state.beside, second.steps[nearest(second.steps, steps[page.place])]),
    main().prompts.some((one) => second.prompts.includes(one)) ? "" : ", which has none of these prompts",
  ] : []));
  for (const [row, one] of page.grid.tiles) fill(one, row);
});

function tile(row) {
  const button = element("button.pair", { type: "button", "aria-label": `Enlarge: ${main().prompts[row]}`, onclick: () => open(row, page.place) });
  const made = element("figure.tile", {}, button, element("figcaption", { title: main().prompts[row] }, main().prompts[row]));
  fill(made, row);
  return made;
}

/** Return the other run's row with the same prompt; repeated prompts are paired in order. */
function sameRow(prompts, row) {
  const own = main().prompts;
  const turn = own.slice(0, row).filter((one) => one === own[row]).length;
  return prompts.flatMap((one, at) => (one === own[row] ? [at] : []))[turn] ?? -1;
}

/** Return the image paths of a prompt at a checkpoint: of this run, and of the other run at the nearest step. */
function imagesAt(row, place) {
  const found = [{ run: state.focus.run, samples: main(), row, place }];
  const second = other();
  if (second) {
    found.push({ run: state.beside, samples: second, row: sameRow(second.prompts, row), place: nearest(second.steps, main().steps[place]) });
  }
  return found.map(({ run, samples: of, row: at, place: column }) => {
    const file = of.files[column]?.[at];
    const step = of.steps[column];
    return { run, step, path: file ? joined(run, "samples", `step_${String(step).padStart(7, "0")}`, file) : null };
  });
}

function fill(made, row) {
  const button = made.firstElementChild;
  const wanted = imagesAt(row, page.place);
  while (button.children.length > wanted.length) button.lastElementChild.remove();
  wanted.forEach(({ path }, number) => {
    let image = button.children[number];
    if (!image) {
      image = element("img", { alt: "", decoding: "async", onload: () => measure(image) });
      button.append(image);
    }
    image.classList.toggle("absent", !path);
    const address = path ? thumbAddress(path, 384) : "data:,";
    if (image.getAttribute("src") !== address) image.src = address;
  });
}

/** Fit tiles to the images, and show the pixels of small ones. */
function measure(image) {
  if (!page || !image.naturalWidth || image.classList.contains("absent")) return;
  image.classList.toggle("pixels", image.naturalWidth <= 64);
  const aspect = (image.naturalHeight / image.naturalWidth) / (other() ? 2 : 1);
  if (Math.abs(aspect - page.aspect) > 0.01) {
    page.aspect = aspect;
    page.grid.show(page.grid.count, true);
  }
}

function open(row, place) {
  const shortName = (id) => nameOf(id, page.overview.name)[1];
  enlarge({
    at([line, column]) {
      const samples = main();
      const found = imagesAt(line, column).filter((one) => one.path);
      if (!found.length) return null;
      return {
        images: found.map((one) => ({ path: one.path, thumb: thumbAddress(one.path, 384), label: other() ? `${shortName(one.run)}, step ${count(one.step)}` : null })),
        prompt: samples.prompts[line],
        facts: [`step ${count(samples.steps[column])}`, `checkpoint ${column + 1} of ${samples.steps.length}`],
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

function drawBeside() {
  const runs = page.overview.run.filter((run) => run.id !== state.focus.run);
  const content = JSON.stringify([runs.map((run) => run.id), state.beside]);
  if (page.beside.dataset.drawn === content) return;
  page.beside.dataset.drawn = content;
  page.beside.replaceChildren(
    element("option", { value: "" }, runs.length ? "nothing" : "no other run"),
    ...runs.map((run) => element("option", { value: run.id, selected: run.id === state.beside }, run.id)),
  );
}
