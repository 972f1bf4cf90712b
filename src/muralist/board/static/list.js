// The list at the side: runs, generation folders or evaluations, their states, and a sparkline of each run's loss.

import { ago, count, element, nameOf, redraw, short } from "./tools.js";
import { COLORS, KIND_OF_TAB, colorOf, state, writeAddress } from "./state.js";

const list = document.getElementById("list");
const search = document.getElementById("search");
const TITLES = { run: "Runs", generation: "Generation folders", evaluation: "Evaluations" };
export const NOTHING = {
  run: "No runs yet. What `muralist train` writes into this folder appears here.",
  generation: "No images yet. What `muralist generate` writes into this folder appears here.",
  evaluation: "No evaluations yet. What `muralist evaluate` writes into this folder appears here.",
};

/** Return a message as nodes; what is in backticks is shown as code. */
export const noteOf = (text) => text.split("`").map((part, place) => (place % 2 ? element("code", {}, part) : part)).filter(Boolean);

/** Create a menu of the runs that the selected one can be compared with; `update` it with each overview. */
export function compareMenu(changed) {
  const menu = element("select", { "aria-label": "Compare with", onchange: () => { state.beside = menu.value || null; writeAddress(); changed(); } });
  const made = element("label", {}, "compare with", menu);
  made.update = (overview) => {
    const runs = overview.run.map((run) => run.id).filter((id) => id !== state.focus.run);
    made.hidden = !runs.length;
    redraw(menu, [runs, state.beside], () => menu.replaceChildren(element("option", { value: "" }, "choose a run"),
      ...runs.map((id) => element("option", { value: id, selected: id === state.beside }, id))));
  };
  return made;
}

const items = new Map(); // by kind and id

/** Return the entries of the list in order: running ones first, then the newest. */
export function listed(overview) {
  const entries = overview?.[KIND_OF_TAB[state.tab]] ?? [];
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (entry) => words.every((word) => entry.id.toLowerCase().includes(word));
  const busy = (entry) => (entry.state === "running" ? 0 : 1);
  const order = (a, b) => busy(a) - busy(b) || (busy(a) ? b.changed - a.changed : 0) || (a.id < b.id ? -1 : 1);
  return entries.filter(fits).sort(order);
}

export function drawList(overview, { look, tick }) {
  const kind = KIND_OF_TAB[state.tab];
  const entries = listed(overview);
  list.setAttribute("aria-label", TITLES[kind]);
  list.setAttribute("aria-multiselectable", String(kind === "run"));
  const drawn = entries.map((entry) => item(kind, entry, overview.name, look, tick));
  if (!drawn.length) drawn.push(element("li.empty", {}, ...noteOf(search.value ? "No entry has this name." : NOTHING[kind])));
  if (drawn.length !== list.children.length || drawn.some((one, place) => list.children[place] !== one)) {
    list.replaceChildren(...drawn);
  }
  document.getElementById("untick").hidden = kind !== "run" || !state.ticked.length;
  const focused = entries.find((entry) => entry.id === state.focus[kind]);
  list.setAttribute("aria-activedescendant", focused ? items.get(`${kind} ${focused.id}`).id : "");
  const chooser = document.getElementById("chooser");
  chooser.querySelector(".state").className = `state ${focused?.state ?? ""}`;
  chooser.querySelector("span").textContent = focused ? nameOf(focused.id, overview.name)[1] : TITLES[kind];
}

function item(kind, entry, rootName, look, tick) {
  const key = `${kind} ${entry.id}`;
  const made = items.get(key) ?? element(`li.${kind}`, { role: "option", id: `item-${items.size}`, onclick: () => look(entry.id) });
  items.set(key, made);
  const color = kind === "run" ? colorOf(entry.id) : -1;
  const ticked = state.ticked.includes(entry.id) && kind === "run";
  made.setAttribute("aria-selected", String(state.focus[kind] === entry.id));
  const [before, name] = nameOf(entry.id, rootName);
  const title = element("span.name", { title: entry.id }, element("small", {}, before), name);
  const box = kind === "run" ? element(`button.tick${color >= 0 ? `.run-${color % COLORS}` : ""}`, {
    type: "button", tabIndex: -1, role: "checkbox", "aria-checked": String(ticked), "aria-label": `Compare ${entry.id}`,
    onclick: (event) => { event.stopPropagation(); tick(entry.id); },
  }, ticked ? "✓" : "") : null;
  redraw(made, [entry, color, ticked, Math.floor(Date.now() / 30000)], () => made.replaceChildren(...[
    box, element("div.about", {}, title, facts(kind, entry)), kind === "run" ? sparkline(entry.sparkline, color) : null,
  ].filter(Boolean)));
  return made;
}

function facts(kind, entry) {
  const usual = entry.state === "running" || entry.state === "finished";
  const line = element("span.facts", { title: entry.message?.replaceAll("`", "") || entry.state }, element(`i.state.${entry.state}`, { role: "img", "aria-label": entry.state }));
  const more = usual && kind === "run" ? [] : [entry.state];
  if (kind === "run" && entry.step !== null) {
    const part = entry.steps && entry.state !== "finished" ? `${Math.floor((100 * entry.step) / entry.steps)}%` : `${count(entry.step)} steps`;
    more.push(part, `loss ${short(entry.loss, 3)}`);
  } else if (kind === "evaluation") {
    const score = entry.scores.fid ? `FID ${short(entry.scores.fid.value)}` : null;
    if (score) more.push(score);
  }
  if (kind !== "run" && entry.state !== "running") more.push(ago(entry.changed));
  line.append(more.join(" · "));
  return line;
}

/** Draw a sparkline; its scale is logarithmic, since a loss falls fast and then slowly. */
function sparkline(values, color) {
  const [width, height] = [64, 24];
  if (values.length < 2) return null;
  const heights = values.every((value) => value > 0) ? values.map(Math.log) : values;
  const [low, high] = [Math.min(...heights), Math.max(...heights)];
  const points = heights.map((value, place) => {
    const x = 1 + (place / (heights.length - 1)) * (width - 2);
    const y = height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  return element("svg.sparkline", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    element("polyline", { points: points.join(" "), style: color >= 0 ? `stroke: var(--run-${color % COLORS})` : null }));
}

/** Return the id that is `by` positions further in the list. */
export function neighbor(overview, by) {
  const ids = listed(overview).map((entry) => entry.id);
  if (!ids.length) return null;
  const place = ids.indexOf(state.focus[KIND_OF_TAB[state.tab]]);
  return ids[Math.max(0, Math.min(ids.length - 1, place + by))];
}

export function scrollToFocus() {
  list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
}
