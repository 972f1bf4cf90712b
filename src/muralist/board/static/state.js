// The state of the page: kept in its address, so that it survives a reload and can be shared.

export const state = {
  tab: "curves",
  focus: { run: null, generation: null, evaluation: null }, // by kind: the selected id
  ticked: [], // ids of runs, in the order of their colors
  x: "step",
  log: false,
  smooth: 0.6,
  zoom: null,
  step: null, // the checkpoint of the samples; null: the newest
  beside: null, // the run to compare samples and settings with
  allSteps: false, // all checkpoints at once
};
export const KIND_OF_TAB = { curves: "run", samples: "run", settings: "run", log: "run", generation: "generation", evaluation: "evaluation" };
export const COLORS = 6;

export function readAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  if (parameters.get("tab") in KIND_OF_TAB) state.tab = parameters.get("tab");
  for (const kind of Object.keys(state.focus)) state.focus[kind] = parameters.get(kind);
  state.ticked = parameters.getAll("tick");
  if (["step", "images", "hours"].includes(parameters.get("x"))) state.x = parameters.get("x");
  state.log = parameters.has("log");
  const smooth = Number(parameters.get("smooth") ?? state.smooth);
  if (smooth >= 0 && smooth < 1) state.smooth = smooth;
  state.step = parameters.has("step") ? Number(parameters.get("step")) : null;
  state.beside = parameters.get("beside");
  state.allSteps = parameters.has("whole");
}

export function writeAddress() {
  const parameters = new URLSearchParams();
  parameters.set("tab", state.tab);
  for (const [kind, id] of Object.entries(state.focus)) if (id !== null) parameters.set(kind, id);
  for (const id of state.ticked) parameters.append("tick", id);
  if (state.x !== "step") parameters.set("x", state.x);
  if (state.log) parameters.set("log", "1");
  if (state.smooth !== 0.6) parameters.set("smooth", state.smooth);
  if (state.step !== null) parameters.set("step", state.step);
  if (state.beside !== null) parameters.set("beside", state.beside);
  if (state.allSteps) parameters.set("whole", "1");
  history.replaceState(null, "", `#${parameters}`);
}

/** Return the runs whose curves are drawn: the ticked ones, and the selected one. */
export function shownRuns() {
  const { run } = state.focus;
  return run === null || state.ticked.includes(run) ? [...state.ticked] : [...state.ticked, run];
}

/** Return the index of a run's color, or -1 for one that is not drawn. */
export const colorOf = (id) => shownRuns().indexOf(id);
