// Curves of one run or several: a line for the mean, in a faint band from minimum to maximum.

import { ask, choice, choose, count, duration, element, nameOf, percent, plural, redraw, short } from "./tools.js";
import { NOTHING, noteOf } from "./list.js";
import { COLORS, colorOf, shownRuns, state, writeAddress } from "./state.js";

const KNOWN = [
  ["train/loss", "Loss", short], ["val/loss", "Held-out loss", short], ["train/learning_rate", "Learning rate", short],
  ["train/grad_norm", "Gradient norm", short], ["train/samples_per_second", "Images per second", short],
  ["train/mfu", "MFU", percent], ["train/data_wait_fraction", "Waiting for data", percent],
  ["train/epoch_loss", "Loss of each epoch", short],
];
const LEFT_OUT = new Set(["train/tokens_per_second"]); // proportional to images per second
const EXACT = new Set(["train/learning_rate"]); // set, not measured: smoothing would only delay it
const AXES = [["step", "steps"], ["images", "images"], ["hours", "hours"]];
const DASHES = ["solid", "dash", "dot"];
const data = new Map(); // by run: its curves, as far as received
let plotly = null;
let page = null;

/** Load plotly, which is large, when the first curve is needed. */
function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    document.head.append(element("script", { src: "/plotly.min.js", onload: () => resolve(window.Plotly), onerror: reject }));
  });
  return plotly;
}

export const curves = {
  open(view) {
    const axes = choice("Horizontal axis", AXES, state.x, (x) => setAxis(x));
    const log = element("button.switch", { type: "button", "aria-pressed": String(state.log), title: "Logarithmic scale (l)", onclick: toggleLog }, "log");
    const smooth = element("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth, "aria-label": "Smoothing",
      oninput: () => { state.smooth = Number(smooth.value); writeAddress(); draw(); },
    });
    const reset = element("button.switch", { type: "button", hidden: true, title: "Full curve (r)", onclick: () => setZoom(null) }, "full curve");
    const legend = element("div.legend");
    const cards = element("div.cards");
    const note = element("p.note");
    page = { axes, log, reset, legend, cards, note, charts: new Map(), overview: null, turn: 0 };
    view.replaceChildren(element("div.tools", {}, axes, log, element("label", {}, "smooth", smooth), reset), legend, note, cards);
  },
  close() {
    for (const { place } of page.charts.values()) window.Plotly?.purge(place);
    page = null;
  },
  async poll(overview) {
    const opened = page;
    opened.overview = overview;
    loadPlotly(); // after the list is drawn, so that loading delays nothing
    const known = new Map(overview.run.map((run) => [run.id, run]));
    const wanted = shownRuns().filter((id) => known.has(id));
    const changed = await Promise.all(wanted.map((id) => update(id, known.get(id))));
    if (page !== opened) return;
    page.note.replaceChildren(...noteOf(wanted.length ? "" : NOTHING.run));
    if (changed.some(Boolean)) page.drawn = "";
    await redraw(page, [wanted, state.x], draw);
  },
  key(key) {
    if (key === "l") toggleLog();
    else if (key === "r") setZoom(null);
    else if (key === "x") {
      const place = AXES.findIndex(([axis]) => axis === state.x);
      setAxis(AXES[(place + 1) % AXES.length][0]);
    } else return false;
    return true;
  },
};

function toggleLog() {
  state.log = !state.log;
  page.log.setAttribute("aria-pressed", String(state.log));
  writeAddress();
  draw();
}

function setAxis(x) {
  [state.x, state.zoom] = [x, null];
  choose(page.axes, x);
  writeAddress();
  curves.poll(page.overview);
}

function setZoom(zoom) {
  state.zoom = zoom;
  page.reset.hidden = zoom === null;
  page.drawn = "";
  curves.poll(page.overview);
}

/** Update the data of a run; returns whether anything changed. */
async function update(id, run) {
  const key = `${state.x} ${state.zoom ?? ""}`;
  const known = data.get(id);
  const same = known?.key === key;
  const sameState = known?.run.state === run.state;
  if (same && sameState && known.run.step === run.step && known.run.changed === run.changed && run.state !== "running") return false;
  if (same && state.zoom) return false; // a zoomed range is not updated
  const have = same && known.version ? `${known.version}.${known.width}.${known.next}` : null;
  const [low, high] = state.zoom ?? [null, null];
  const news = await ask("curves", { run: id, x: state.x, low, high, have });
  const old = data.get(id);
  const adds = have !== null && old === known && news.version === known.version && news.width === known.width && news.begin > 0;
  if (adds && news.rows === known.rows) {
    known.run = run;
    return !sameState;
  }
  data.set(id, { ...(adds ? append(known, news) : news), key, run });
  return true;
}

/** Append new buckets; the last known one may have been incomplete. */
function append(known, news) {
  const kept = news.begin / news.width;
  const series = {};
  for (const [name, parts] of Object.entries(news.series)) {
    series[name] = {};
    for (const [part, values] of Object.entries(parts)) {
      const before = known.series[name]?.[part]?.slice(0, kept) ?? new Array(kept).fill(null);
      series[name][part] = before.concat(values);
    }
  }
  return { ...news, begin: known.begin, x: known.x.slice(0, kept).concat(news.x), series };
}

/** Exponential moving average with bias correction. */
function smoothed(values, keep) {
  if (!keep) return values;
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return Number((sum / weight).toPrecision(6)); // more digits are rounding noise
  });
}

async function draw() {
  const opened = page;
  const Plotly = await loadPlotly();
  if (page !== opened || !page) return;
  const runs = shownRuns().filter((id) => data.has(id)).map((id) => ({ id, color: colorOf(id), ...data.get(id) }));
  drawLegend(runs);
  const found = new Set(runs.flatMap((run) => Object.keys(run.series)));
  const others = [...found].filter((name) => !KNOWN.some(([known]) => known === name) && !LEFT_OUT.has(name)).sort();
  const metrics = [...KNOWN.filter(([name]) => found.has(name)), ...others.map((name) => [name, name, short])];
  for (const [name, chart] of page.charts) {
    if (!metrics.some(([metric]) => metric === name)) {
      Plotly.purge(chart.place);
      chart.card.remove();
      page.charts.delete(name);
    }
  }
  const style = getComputedStyle(document.documentElement);
  const turn = (page.turn += 1);
  for (const [place, [name, title, format]] of metrics.entries()) {
    const chart = page.charts.get(name) ?? newChart(name, title);
    if (page.cards.children[place] !== chart.card) page.cards.insertBefore(chart.card, page.cards.children[place] ?? null);
    chart.last.replaceChildren(...lastValues(runs, name, format));
    const isNew = !chart.listening;
    drawChart(Plotly, chart, runs, name, format, style);
    if (!isNew) continue;
    await new Promise((resolve) => { setTimeout(resolve); }); // the first chart appears before the last is drawn
    if (page !== opened || page.turn !== turn) return; // a later call draws them all
  }
}

function newChart(name, title) {
  const place = element("div.chart");
  const last = element("span.last");
  const card = element(`section.card${name === "train/loss" ? ".large" : ""}`, { "data-metric": name }, element("h2", {}, title, last), place);
  const chart = { card, place, last, listening: false };
  page.charts.set(name, chart);
  return chart;
}

function lastValues(runs, name, format) {
  return runs.flatMap((run) => {
    const value = run.series[name]?.mean.findLast((one) => one !== null);
    return value === undefined ? [] : [element("span", { title: run.id }, element(`i.dot.run-${run.color % COLORS}`), format(value))];
  });
}

function drawChart(Plotly, chart, runs, name, format, style) {
  const color = (variable) => style.getPropertyValue(variable).trim();
  const traces = [];
  for (const run of runs) {
    const parts = run.series[name];
    if (!parts) continue;
    const own = color(`--run-${run.color % COLORS}`);
    const dash = DASHES[Math.floor(run.color / COLORS) % DASHES.length];
    const few = parts.mean.filter((value) => value !== null);
    const sparse = few.length < 0.5 * parts.mean.length || few.length < 3;
    const x = run.x;
    const base = { x, type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false };
    const keep = sparse || EXACT.has(name) ? 0 : state.smooth;
    if (parts.low && !sparse) {
      traces.push({ ...base, y: parts.low, line: { width: 0 } });
      traces.push({ ...base, y: parts.high, line: { width: 0 }, fill: "tonexty", fillcolor: `${own}2b` });
    } else if (keep) {
      traces.push({ ...base, y: parts.mean, line: { width: 1, color: `${own}50` } });
    }
    const y = smoothed(parts.mean, keep);
    traces.push({
      ...base, y, hoverinfo: "x+y+name", name: shortName(run.id), connectgaps: true,
      mode: sparse ? "lines+markers" : "lines", line: { color: own, width: 2, dash }, marker: { color: own, size: 6 },
      text: y.map((value) => format(value)), hovertemplate: `%{text}<extra>${escaped(shortName(run.id))}</extra>`,
    });
  }
  const axis = { gridcolor: color("--line"), zeroline: false, linecolor: color("--line"), tickfont: { color: color("--quiet"), size: 11 } };
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: "zoom", hovermode: "x unified",
    font: { color: color("--text"), family: style.fontFamily, size: 12 }, margin: { l: 54, r: 8, t: 6, b: 24 },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") } },
    xaxis: {
      ...axis, showgrid: false, hoverformat: state.x === "hours" ? ".2f" : ",d", tickformat: state.x === "hours" ? "" : "~s",
      ticksuffix: state.x === "hours" ? " h" : "", ...(state.zoom ? { range: state.zoom, autorange: false } : { autorange: true }),
    },
    yaxis: { ...axis, fixedrange: true, ...verticalAxis(traces, format) },
  };
  Plotly.react(chart.place, traces, layout, { displayModeBar: false, responsive: true, doubleClick: false });
  if (chart.listening) return;
  chart.listening = true;
  chart.place.on("plotly_relayout", (event) => {
    if (event["xaxis.range[0]"] === undefined) return;
    const range = [Number(event["xaxis.range[0]"]), Number(event["xaxis.range[1]"])];
    if (!state.zoom || range.some((edge, side) => edge !== state.zoom[side])) setZoom(range);
  });
  chart.place.on("plotly_doubleclick", () => setZoom(null));
}

/** Return range and ticks of a vertical axis; the ticks are written as people write them: 8e-5, 0.2, 1,500. */
function verticalAxis(traces, format) {
  const isLog = state.log && format !== percent;
  const values = traces.flatMap(({ y }) => y.filter((value) => value !== null && (!isLog || value > 0)));
  if (!values.length) return {};
  const [least, most] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const around = most - least <= 1e-4 * Math.abs(most) ? 0.2 * Math.abs(most) || 1 : 0; // a constant: rounding errors are not magnified
  const [low, high] = [format === percent ? Math.min(0, least) : least - around, most + around];
  const tickvals = isLog ? logTicks(low, high) : linearTicks(low, high);
  const isSmall = format !== percent && high < 0.01;
  const ticktext = tickvals.map((value) => (isSmall && value ? Number(value.toPrecision(3)).toExponential() : format(value, 6)));
  const edges = isLog ? [Math.log10(low), Math.log10(high)] : [low, high];
  const margin = 0.06 * (edges[1] - edges[0]);
  return { type: isLog ? "log" : "linear", range: [edges[0] - (low ? margin : 0), edges[1] + margin], tickvals, ticktext };
}

function linearTicks(low, high) {
  const least = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= least);
  const [first, last] = [Math.ceil(low / step), Math.floor(high / step)];
  return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
}

/** Ticks of a logarithmic axis: 1, 2 and 5 of each decade, or the decades alone where there are many. */
function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const steps = last - first > 3 ? [1] : last - first > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7];
  return Array.from({ length: last - first + 1 }, (_, place) => steps.map((one) => Number((one * 10 ** (first + place)).toPrecision(3)))).flat();
}

const shortName = (id) => {
  const name = nameOf(id, page.overview.name)[1];
  return name.length > 28 ? `…${name.slice(-27)}` : name;
};

/** Plotly interprets labels as a subset of HTML. */
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%&#123;");

function drawLegend(runs) {
  page.legend.replaceChildren(...runs.map((run) => {
    const { step, steps, images, state: status, message } = run.run;
    const facts = [status];
    if (step !== null) facts.push(steps ? `step ${count(step)} of ${count(steps)}` : plural(step, "step"), plural(images, "image"));
    const rate = run.series["train/samples_per_second"]?.mean.findLast((one) => one !== null);
    if (status === "running" && rate && steps && step) facts.push(`${duration(((steps - step) * images) / step / rate)} left`);
    const chip = element("div.chip", { title: run.id }, element(`i.dot.run-${run.color % COLORS}`), element("strong", {}, shortName(run.id)), element("span", {}, facts.join(" · ")));
    if (message) chip.append(element("p.message", {}, ...noteOf(message)));
    if (status === "running" && steps) chip.append(element("progress", { max: steps, value: step ?? 0, "aria-label": "Progress" }));
    return chip;
  }));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (page) draw(); });
