// What the page shows: kept in its address, so that it survives a reload and can be passed on.

export const state = {
  tab: "curves",
  focus: { run: null, generation: null, evaluation: null }, // by kind: the id that is looked at
  ticked: [], // ids of runs, in the order of their colours
  x: "step",
  log: false,
  smooth: 0.6,
  zoom: null,
  step: null, // the checkpoint of the samples; null: the newest
  beside: null, // a second run's samples
  whole: false, // all checkpoints at once
};
export const KIND_OF_TAB = { curves: "run", samples: "run", generation: "generation", evaluation: "evaluation" };
export const COLOURS = 6;

export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (words.get("tab") in KIND_OF_TAB) state.tab = words.get("tab");
  for (const kind of Object.keys(state.focus)) state.focus[kind] = words.get(kind);
  state.ticked = words.getAll("tick");
  if (["step", "images", "hours"].includes(words.get("x"))) state.x = words.get("x");
  state.log = words.has("log");
  const smooth = Number(words.get("smooth") ?? state.smooth);
  if (smooth >= 0 && smooth < 1) state.smooth = smooth;
  state.step = words.has("step") ? Number(words.get("step")) : null;
  state.beside = words.get("beside");
  state.whole = words.has("whole");
}

export function writeAddress() {
  const words = new URLSearchParams();
  words.set("tab", state.tab);
  for (const [kind, id] of Object.entries(state.focus)) if (id !== null) words.set(kind, id);
  for (const id of state.ticked) words.append("tick", id);
  if (state.x !== "step") words.set("x", state.x);
  if (state.log) words.set("log", "1");
  if (state.smooth !== 0.6) words.set("smooth", state.smooth);
  if (state.step !== null) words.set("step", state.step);
  if (state.beside !== null) words.set("beside", state.beside);
  if (state.whole) words.set("whole", "1");
  history.replaceState(null, "", `#${words}`);
}

/** The runs whose curves are drawn: the ticked ones, and the one looked at. */
export function shownRuns() {
  const { run } = state.focus;
  return run === null || state.ticked.includes(run) ? [...state.ticked] : [...state.ticked, run];
}

/** The number of a run's colour; -1 for one that is not drawn. */
export const colourOf = (id) => shownRuns().indexOf(id);
