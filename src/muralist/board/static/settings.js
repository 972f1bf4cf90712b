// The settings of a run and their differences to those of other runs; the end of a run's log.

import { ask, askRuns, element, forget, nameOf, redraw, written } from "./tools.js";
import { state } from "./state.js";
import { NOTHING, compareMenu, noteOf } from "./list.js";

const settingsOf = new Map(); // by run
let page = null;

/** Return the selected run, the one it is compared with, and the ticked ones. */
function comparedRuns(overview) {
  const wanted = [state.focus.run, state.beside, ...state.ticked];
  return [...new Set(wanted)].filter((id) => overview.run.some((run) => run.id === id));
}

export const settings = {
  open(view) {
    const compare = compareMenu(() => settings.poll(page.overview));
    const switched = element("button.switch", { type: "button", "aria-pressed": "true", onclick: () => {
      switched.setAttribute("aria-pressed", String(switched.getAttribute("aria-pressed") !== "true"));
      draw(comparedRuns(page.overview));
    } }, "differences only");
    page = { compare, switched, note: element("p.note"), sections: element("div.sections") };
    view.replaceChildren(element("div.tools", {}, compare, switched), page.note, page.sections);
  },
  close() { page = null; },
  async poll(overview) {
    const opened = page;
    page.overview = overview;
    page.compare.update(overview);
    const runs = comparedRuns(overview);
    await askRuns("settings", runs, settingsOf);
    if (page === opened) redraw(page, [runs, ...runs.map((id) => settingsOf.get(id))], () => draw(runs));
  },
};

function draw(runs) {
  const all = runs.map((id) => settingsOf.get(id) ?? {});
  const names = [...new Set(all.flatMap(Object.keys))];
  const differ = new Set(names.filter((name) => new Set(all.map((one) => JSON.stringify(one[name] ?? null))).size > 1));
  page.switched.hidden = runs.length < 2;
  const shown = runs.length > 1 && page.switched.getAttribute("aria-pressed") === "true" ? names.filter((name) => differ.has(name)) : names;
  page.note.replaceChildren(...noteOf(!runs.length ? NOTHING.run : shown.length ? "" : names.length ? "These runs have the same settings." : "This run has no settings that can be read."));
  const sectionOf = (name) => (runs.length > 1 ? "" : name.includes(".") ? name.slice(0, name.indexOf(".")) : "run");
  const heads = runs.length > 1 ? runs.map((id) => element("th", { title: id }, nameOf(id, page.overview.name)[1])) : [];
  page.sections.replaceChildren(...[...new Set(shown.map(sectionOf))].map((section) => element("section.card", {}, section && element("h2", {}, section),
    settingsTable(all, shown.filter((name) => sectionOf(name) === section), section.length && section !== "run" ? section.length + 1 : 0, heads, differ))));
}

/** Create a table of settings, with a column for each of `all`; `cut` characters of each name are left out. */
export function settingsTable(all, names, cut = 0, heads = [], differ = new Set()) {
  const row = (name) => element(differ.has(name) ? "tr.differs" : "tr", {}, element("th", { scope: "row" }, ...parts(name.slice(cut))), ...all.map((one) => element("td", {}, written(one[name]))));
  return element("table.settings", {}, heads.length ? element("thead", {}, element("tr", {}, element("th"), ...heads)) : null, element("tbody", {}, ...names.map(row)));
}

/** Let a long name break after its underscores and dots. */
const parts = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")]);

const TIME = /^(\d{4}-\d\d-\d\d )(\d\d:\d\d:\d\d) /; // as training writes it

export const log = {
  open(view) {
    page = { note: element("p.note"), about: element("p.sides"), lines: element("pre.log.card", { tabIndex: 0, "aria-label": "Log" }), drawn: null };
    view.replaceChildren(page.note, page.about, page.lines);
  },
  close() { page = null; },
  async poll() {
    const opened = page;
    const run = state.focus.run;
    if (page.drawn !== run) forget("log");
    const news = run === null ? { text: "" } : await ask("log", { run }, "log");
    if (page !== opened || !news) return;
    const { scrollTop, clientHeight, scrollHeight } = page.lines;
    const atEnd = page.drawn !== run || scrollTop + clientHeight > scrollHeight - 40;
    page.drawn = run;
    page.note.replaceChildren(...noteOf(run === null ? NOTHING.run : news.text ? "" : "This run has no log yet."));
    page.about.textContent = news.text ? `${news.is_whole ? "" : "the end of "}${run === "." ? "" : `${run}/`}logs/train.log` : "";
    page.lines.hidden = !news.text;
    page.lines.replaceChildren(...news.text.split("\n").slice(0, -1).map((line) => {
      const [, date, time] = line.match(TIME) ?? [];
      return element("div", {}, ...(time ? [element("time", { title: date + time }, element("span", {}, date), time), " ", line.replace(TIME, "")] : [line]));
    }));
    if (atEnd) page.lines.scrollTop = page.lines.scrollHeight;
  },
};
