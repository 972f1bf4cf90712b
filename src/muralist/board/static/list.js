// The list at the side: what there is, how it is, and a small curve of each run's loss.

import { ago, count, element, nameOf, short } from "./tools.js";
import { COLOURS, KIND_OF_TAB, colourOf, state } from "./state.js";

const list = document.getElementById("list");
const search = document.getElementById("search");
const WORDS = { run: "Runs", generation: "Generation folders", evaluation: "Evaluations" };
export const NOTHING = {
  run: "No runs yet. What `muralist train` writes into this folder appears here.",
  generation: "No pictures yet. What `muralist generate` writes into this folder appears here.",
  evaluation: "No evaluations yet. What `muralist evaluate` writes into this folder appears here.",
};
const items = new Map(); // by kind and id: the element and what it shows

/** What the list holds now, in its order: those at work first, then the newest. */
export function listed(overview) {
  const things = overview?.[KIND_OF_TAB[state.tab]] ?? [];
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (thing) => words.every((word) => thing.id.toLowerCase().includes(word));
  const busy = (thing) => (thing.state === "running" ? 0 : 1);
  const order = (a, b) => busy(a) - busy(b) || (busy(a) ? b.changed - a.changed : 0) || (a.id < b.id ? -1 : 1);
  return things.filter(fits).sort(order);
}

export function drawList(overview, { look, tick }) {
  const kind = KIND_OF_TAB[state.tab];
  const things = listed(overview);
  list.setAttribute("aria-label", WORDS[kind]);
  list.setAttribute("aria-multiselectable", String(kind === "run"));
  const drawn = things.map((thing) => item(kind, thing, overview.name, look, tick));
  if (!drawn.length) drawn.push(element("li.empty", {}, search.value ? "Nothing has this name." : NOTHING[kind]));
  if (drawn.length !== list.children.length || drawn.some((one, place) => list.children[place] !== one)) {
    list.replaceChildren(...drawn);
  }
  document.getElementById("untick").hidden = kind !== "run" || !state.ticked.length;
  const focused = things.find((thing) => thing.id === state.focus[kind]);
  list.setAttribute("aria-activedescendant", focused ? items.get(`${kind} ${focused.id}`).element.id : "");
  const chooser = document.getElementById("chooser");
  chooser.querySelector(".state").className = `state ${focused?.state ?? ""}`;
  chooser.querySelector("span").textContent = focused ? nameOf(focused.id, overview.name)[1] : WORDS[kind];
}

function item(kind, thing, rootName, look, tick) {
  const key = `${kind} ${thing.id}`;
  let known = items.get(key);
  if (!known) {
    known = { element: element("li", { role: "option", id: `item-${items.size}`, onclick: () => look(thing.id) }), said: "" };
    items.set(key, known);
  }
  const colour = kind === "run" ? colourOf(thing.id) : -1;
  const ticked = state.ticked.includes(thing.id) && kind === "run";
  const focused = state.focus[kind] === thing.id;
  known.element.setAttribute("aria-selected", String(focused));
  const said = JSON.stringify([thing, colour, ticked, Math.floor(Date.now() / 30000)]);
  if (said === known.said) return known.element;
  known.said = said;
  const [before, name] = nameOf(thing.id, rootName);
  const title = element("span.name", { title: thing.id }, element("small", {}, before), name);
  const box = kind === "run" ? element(`button.tick${colour >= 0 ? `.run-${colour % COLOURS}` : ""}`, {
    type: "button", tabIndex: -1, role: "checkbox", "aria-checked": String(ticked), "aria-label": `Compare ${thing.id}`,
    onclick: (event) => { event.stopPropagation(); tick(thing.id); },
  }, ticked ? "✓" : "") : null;
  known.element.className = kind;
  known.element.replaceChildren(...[
    box, element("div.about", {}, title, facts(kind, thing)), kind === "run" ? spark(thing.sparks, colour) : null,
  ].filter(Boolean));
  return known.element;
}

function facts(kind, thing) {
  const usual = thing.state === "running" || thing.state === "finished";
  const line = element("span.facts", { title: thing.said || thing.state }, element(`i.state.${thing.state}`, { role: "img", "aria-label": thing.state }));
  const more = usual && kind === "run" ? [] : [thing.state];
  if (kind === "run" && thing.step !== null) {
    const part = thing.steps && thing.state !== "finished" ? `${Math.floor((100 * thing.step) / thing.steps)}%` : `${count(thing.step)} steps`;
    more.push(part, `loss ${short(thing.loss, 3)}`);
  } else if (kind === "evaluation") {
    const score = thing.scores.fid ? `FID ${short(thing.scores.fid.value)}` : null;
    if (score) more.push(score);
  }
  if (kind !== "run" && thing.state !== "running") more.push(ago(thing.changed));
  line.append(more.join(" · "));
  return line;
}

/** A curve in the size of a word; the scale is logarithmic, since a loss falls fast and then slowly. */
function spark(values, colour) {
  const [width, height] = [64, 24];
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.setAttribute("class", "spark");
  drawing.setAttribute("aria-hidden", "true");
  if (values.length < 2) return drawing;
  const heights = values.every((value) => value > 0) ? values.map(Math.log) : values;
  const [low, high] = [Math.min(...heights), Math.max(...heights)];
  const points = heights.map((value, place) => {
    const x = 1 + (place / (heights.length - 1)) * (width - 2);
    const y = height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  line.setAttribute("style", colour >= 0 ? `stroke: var(--run-${colour % COLOURS})` : "");
  drawing.append(line);
  return drawing;
}

/** The id that is `by` places further in the list. */
export function neighbour(overview, by) {
  const ids = listed(overview).map((thing) => thing.id);
  if (!ids.length) return null;
  const place = ids.indexOf(state.focus[KIND_OF_TAB[state.tab]]);
  return ids[Math.max(0, Math.min(ids.length - 1, place + by))];
}

export function scrollToFocus() {
  list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
}
