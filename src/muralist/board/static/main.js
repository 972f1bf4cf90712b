// The page: tabs, keys, and an update every two seconds while the page is visible.

import { ask } from "./tools.js";
import { KIND_OF_TAB, readAddress, state, writeAddress } from "./state.js";
import { drawList, listed, neighbor, scrollToFocus } from "./list.js";
import { curves } from "./curves.js";
import { samples } from "./samples.js";
import { log, settings } from "./settings.js";
import { generation } from "./generation.js";
import { evaluation } from "./evaluation.js";
import { isEnlarged } from "./viewer.js";

const views = { curves, samples, settings, log, generation, evaluation };
const INTERVAL = 2000; // milliseconds
const view = document.getElementById("view");
const search = document.getElementById("search");
const live = document.getElementById("live");
const keys = document.getElementById("keys");
const chooser = document.getElementById("chooser");
let overview = null;
let opened = null;
let timer = null;
let looking = null;

function openTab(tab) {
  choosing(false);
  if (opened === tab) return;
  if (opened) views[opened].close();
  [state.tab, opened] = [tab, tab];
  for (const button of document.querySelectorAll("[role=tab]")) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
  writeAddress();
  views[tab].open(view);
  scrollTo(0, 0);
  show();
}

/** Draw the list and bring the view up to date. */
function show() {
  if (!overview) return;
  const kind = KIND_OF_TAB[state.tab];
  if (!overview[kind].some((entry) => entry.id === state.focus[kind])) state.focus[kind] = listed(overview)[0]?.id ?? null;
  drawList(overview, { look, tick });
  return views[state.tab].poll(overview);
}

function look(id) {
  if (id === null) return;
  const kind = KIND_OF_TAB[state.tab];
  if (state.focus[kind] !== id && kind === "run") [state.zoom, state.step] = [null, null];
  state.focus[kind] = id;
  choosing(false);
  writeAddress();
  refresh();
}

/** On a phone the list covers the view while it is open. */
function choosing(open) {
  document.body.classList.toggle("choosing", open);
  chooser.setAttribute("aria-expanded", String(open));
}

function tick(id) {
  state.ticked = state.ticked.includes(id) ? state.ticked.filter((one) => one !== id) : [...state.ticked, id];
  writeAddress();
  refresh();
}

async function refresh() {
  try {
    await show();
    scrollToFocus();
  } catch (error) {
    lost(error);
  }
}

function lost(error) {
  live.className = "off";
  live.title = live.textContent = "no answer";
  if (!(error instanceof TypeError)) console.warn(error.message); // fetch throws a TypeError without an answer
}

/** Update everything on the screen, then pause. Hidden pages are not updated. */
async function cycle() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const news = await ask("overview", {}, "overview");
    if (news) {
      const isThere = (id) => news.run.some((run) => run.id === id);
      state.ticked = state.ticked.filter(isThere);
      if (!isThere(state.beside)) state.beside = null;
      writeAddress();
      overview = news;
      document.getElementById("root").textContent = news.name;
      document.getElementById("root").title = news.root;
      document.title = `${news.name} · muralist board`;
    }
    await show();
    live.className = "on";
    live.textContent = "live";
    live.title = "Updated every two seconds";
  } catch (error) {
    lost(error);
  }
  timer = setTimeout(again, INTERVAL);
}

const again = () => { looking ??= cycle().finally(() => { looking = null; }); };

document.addEventListener("visibilitychange", again);
for (const button of document.querySelectorAll("[role=tab]")) button.addEventListener("click", () => openTab(button.dataset.tab));
search.addEventListener("input", refresh);
search.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" && event.key !== "Enter") return;
  if (event.key === "Escape") search.value = "";
  search.blur();
  refresh();
});
document.querySelector("#untick button").addEventListener("click", () => { state.ticked = []; writeAddress(); refresh(); });
document.getElementById("help").addEventListener("click", () => keys.showModal());
keys.querySelector(".close").addEventListener("click", () => keys.close());
keys.addEventListener("click", (event) => { if (event.target === keys) keys.close(); });
chooser.addEventListener("click", () => choosing(!document.body.classList.contains("choosing")));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isEnlarged() || keys.open) return;
  const { key, target } = event;
  const writing = target.matches("input[type=search], select, textarea");
  if (writing) return;
  const sliding = target.matches("input[type=range]") && key.startsWith("Arrow");
  const pressing = target.matches("button, a, summary") && (key === " " || key === "Enter");
  if (sliding || pressing) return;
  const tabs = Object.keys(views);
  if (key === "/") search.focus();
  else if (key === "?") keys.showModal();
  else if (key === "j" || key === "ArrowDown") look(neighbor(overview, 1));
  else if (key === "k" || key === "ArrowUp") look(neighbor(overview, -1));
  else if (key === " " && KIND_OF_TAB[state.tab] === "run" && state.focus.run !== null) tick(state.focus.run);
  else if (tabs[Number(key) - 1]) openTab(tabs[Number(key) - 1]);
  else if (!views[state.tab].key?.(key)) return;
  event.preventDefault();
});

readAddress();
openTab(state.tab);
again();
