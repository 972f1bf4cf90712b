// A generation folder: a bar for each GPU, the newest images, failures with their reasons, and all images.

import { ask, count, duration, element, forget, framed, joined, plural, redraw, short, thumbAddress } from "./tools.js";
import { state } from "./state.js";
import { NOTHING, noteOf } from "./list.js";
import { settingsTable } from "./settings.js";
import { enlarge } from "./viewer.js";

const PAGE_SIZE = 100; // ledger lines per request
const MAX_HEIGHT = 15_000_000; // pixels; browsers draw no taller page
const BEYOND = 400; // pixels around the screen
const [LEAST, CAPTION, GAP] = [150, 26, 12]; // pixels of a tile, of its text, and between tiles
let page = null;

export const generation = {
  open(view) {
    const [note, head, bars, newest, failures, all] = [element("p.note"), element("div.totals"), element("div.bars"), element("div.strip"), element("div.failures"), element("h2")];
    const settings = element("div");
    const [grid, watcher] = [element("div.images"), new ResizeObserver(drawTiles)];
    watcher.observe(grid);
    addEventListener("scroll", drawTiles, { passive: true });
    const parts = element("div", {}, head, element("section.card", {}, bars), element("section.card", {}, element("h2", {}, "Newest"), newest), failures,
      element("details.card", {}, element("summary", {}, "Settings"), settings), all, grid);
    page = { note, head, bars, newest, failures, settings, all, grid, watcher, tiles: new Map(), columns: 2, parts, folder: null, version: null, pages: new Map(), total: 0 };
    view.replaceChildren(note, parts);
  },
  close() {
    page.watcher.disconnect();
    removeEventListener("scroll", drawTiles);
    page = null;
  },
  async poll(overview) {
    const opened = page;
    const folder = state.focus.generation;
    const there = overview.generation.some((one) => one.id === folder);
    page.parts.hidden = !there;
    page.note.replaceChildren(...noteOf(there ? "" : NOTHING.generation));
    if (!there) return;
    if (page.folder !== folder) {
      [page.folder, page.version] = [folder, null];
      forget("generation");
    }
    const news = await ask("generation", { folder }, "generation");
    if (page !== opened || page.folder !== folder || !news) return;
    draw(news);
    if (news.read < 1) setTimeout(() => { if (page === opened && page.folder === folder) generation.poll(overview); }, 50);
  },
};

function draw(news) {
  const { workers, done, failed } = news;
  const running = news.state === "running";
  const speed = workers.reduce((sum, worker) => sum + worker.speed, 0);
  const total = workers.reduce((sum, worker) => sum + (worker.total ?? 0), 0) + news.unassigned;
  const finished = workers.reduce((sum, worker) => sum + (worker.total === null ? 0 : worker.done + worker.failed), 0);
  const fact = (value, label) => element("div", {}, element("b", {}, value), element("span", {}, label));
  page.head.replaceChildren(...[
    fact(count(done), done === 1 ? "image" : "images"), fact(count(failed), "failed"),
    fact(speed ? short(speed, 3) : "–", running ? "images per second" : "images per second, at the end"),
    running && total ? fact(speed ? duration((total - finished) / speed) : "–", "left") : null,
    fact(news.read < 1 ? `${Math.round(100 * news.read)}%` : news.state, news.read < 1 ? "of the ledger is read" : "state"),
  ].filter(Boolean));
  drawBars(news, running, total, finished);
  redraw(page.newest, [page.folder, news.newest.map((line) => line.file)], () => drawNewest(news.newest));
  redraw(page.failures, [news.failures, news.failed], () => drawFailures(news));
  page.all.textContent = done ? "All images" : "";
  if (news.version !== page.version || done !== page.total) {
    if (news.version !== page.version) page.tiles.clear();
    [page.version, page.total] = [news.version, done];
    page.pages.clear();
    drawTiles();
    page.settings.replaceChildren(settingsTable([news.settings], Object.keys(news.settings)));
  }
}

function drawBars({ workers, done, failed, planned }, running, total, finished) {
  const largest = Math.max(1, ...workers.map((worker) => worker.done + worker.failed));
  const line = (name, worker) => {
    const total = worker.total ?? largest;
    const part = (value) => `${(100 * value) / Math.max(1, total)}%`;
    const facts = [worker.total === null ? plural(worker.done, "image") : `${count(worker.done + worker.failed)} of ${count(worker.total)}`];
    if (worker.failed) facts.push(`${count(worker.failed)} failed`);
    if (worker.speed) facts.push(`${short(worker.speed, 3)}/s`);
    const bar = element("span.bar", { role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": worker.done + worker.failed, "aria-label": name },
      element("i.done", { style: `width:${part(worker.done)}` }), element("i.failed", { style: `width:${part(worker.failed)}` }));
    return element("div.gpu", {}, element("span.label", {}, name), bar, element("span.facts", {}, facts.join(" · ")));
  };
  const lines = workers.map((worker) => line(`GPU ${worker.gpu}`, worker));
  const speed = running ? workers.reduce((sum, worker) => sum + worker.speed, 0) : 0;
  let sum = null;
  if (planned) {  // of all commands together; the last one may have planned fewer than there are
    sum = { done, failed, total: Math.max(planned, done + failed), speed };
  } else if (running && total && workers.length > 1) {
    const missing = workers.reduce((all, worker) => all + worker.failed, 0);
    sum = { done: finished - missing, failed: missing, total, speed };
  }
  if (sum && lines.length) {
    lines.push(line("all", sum));
    lines.at(-1).classList.add("sum");
  }
  page.bars.replaceChildren(...(lines.length ? lines : [element("p.quiet", {}, "No image yet: models are being loaded.")]));
}

function drawNewest(newest) {
  const source = {
    at: (place) => about(newest[place], `${place + 1} of the newest ${newest.length}`),
    move: (place, x, y) => (newest[place + x + y] ? place + x + y : null),
  };
  page.newest.replaceChildren(...newest.slice(0, 24).map((line, place) => element("button", {
    type: "button", title: line.prompt, "aria-label": `Enlarge: ${line.prompt}`, onclick: () => enlarge(source, place),
  }, element("img", { src: thumbAddress(joined(page.folder, line.file), 192), alt: "", decoding: "async" }))));
}

function drawFailures({ failures, reasons, failed }) {
  if (!failed) {
    page.failures.replaceChildren();
    return;
  }
  const cells = (line) => [line.id, line.seed, line.prompt, line.error, line.gpu].map((value) => element("td", {}, String(value ?? "")));
  page.failures.replaceChildren(element("section.card", {},
    element("h2", {}, `${plural(failed, "failure")}`),
    element("ul.reasons", {}, ...reasons.map(([reason, times]) => element("li", {}, element("b", {}, `${count(times)} ×`), " ", ...noteOf(reason)))),
    element("details", {}, element("summary", {}, failed > failures.length ? `The last ${failures.length}` : "Each of them"),
      element("div.wide", {}, element("table", {}, element("thead", {}, element("tr", {}, ...["Id", "Seed", "Prompt", "Error", "GPU"].map((head) => element("th", {}, head)))),
        element("tbody", {}, ...failures.map((line) => element("tr", {}, ...cells(line)))))))));
}

/** Request the ledger lines of the tiles on the screen. */
async function fetchRange(first, last) {
  const opened = page;
  for (let begin = first - (first % PAGE_SIZE); begin < last; begin += PAGE_SIZE) await lines(begin);
  if (page !== opened) return;
  for (const [index, one] of page.tiles) await fill(one, index);
}

function lines(begin) {
  if (!page.pages.has(begin)) {
    page.pages.set(begin, ask("images", { folder: page.folder, begin, count: PAGE_SIZE }).then((answer) => answer.images).catch(() => []));
    if (page.pages.size > 60) page.pages.delete(page.pages.keys().next().value);
  }
  return page.pages.get(begin);
}

const lineAt = async (index) => (await lines(index - (index % PAGE_SIZE)))[index % PAGE_SIZE];

function tile(index) {
  const source = {
    at: async (place) => about(await lineAt(place), `${count(place + 1)} of ${count(page.total)}`),
    move: (place, x, y) => {
      const next = place + x + y * page.columns;
      return next >= 0 && next < page.total ? next : null;
    },
  };
  return element("figure.tile.square", {}, element("button", { type: "button", "aria-label": `Enlarge image ${index + 1}`, onclick: () => enlarge(source, index) }), element("figcaption"));
}

async function fill(made, index) {
  const line = await lineAt(index);
  if (!line?.file || made.dataset.file === line.file || !made.isConnected) return;
  made.dataset.file = line.file;
  made.firstElementChild.replaceChildren(element("img", { src: thumbAddress(joined(page.folder, line.file), 192), alt: line.prompt, decoding: "async" }));
  made.lastElementChild.textContent = line.prompt;
  made.lastElementChild.title = line.prompt;
}

function about(line, where) {
  if (!line?.file) return null;
  const path = joined(page.folder, line.file);
  return {
    images: [{ path, thumb: thumbAddress(path, 192) }],
    prompt: line.prompt,
    facts: [`seed ${line.seed}`, `row ${count(line.index + 1)}`, `GPU ${line.gpu}`, `${short(line.seconds)} s`, where],
  };
}

/** Draw all images, of any number: only the rows of tiles near the screen exist. */
const drawTiles = framed(() => {
  if (!page?.grid.clientWidth) return;
  const columns = Math.max(2, Math.floor((page.grid.clientWidth + GAP) / (LEAST + GAP)));
  const height = (page.grid.clientWidth + GAP) / columns + CAPTION;
  const rows = Math.min(Math.ceil(page.total / columns), Math.floor(MAX_HEIGHT / height));
  const top = -page.grid.getBoundingClientRect().top;
  const row = (at) => Math.min(rows, Math.max(0, at));
  const [first, last] = [row(Math.floor((top - BEYOND) / height)) * columns, Math.min(page.total, row(Math.ceil((top + innerHeight + BEYOND) / height)) * columns)];
  page.columns = columns;
  page.grid.style.cssText = `height: ${rows * height}px; padding-top: ${(first / columns) * height}px; grid: auto-flow ${height - GAP}px / repeat(${columns}, minmax(0, 1fr))`;
  page.tiles = new Map(Array.from({ length: last - first }, (_, place) => [first + place, page.tiles.get(first + place) ?? tile(first + place)]));
  redraw(page.grid, [page.version, first, last], () => page.grid.replaceChildren(...page.tiles.values()));
  if (last > first) fetchRange(first, last);
});
