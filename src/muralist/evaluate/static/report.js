"use strict";
// Only texts and attributes that the page already holds are moved around here: nothing is ever parsed as HTML.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const thumbnails = read("thumbnail-data");
for (const image of document.querySelectorAll("img[data-image]")) {
  image.decoding = "async";
  image.src = thumbnails[image.dataset.image];
}

// The filter: every word has to be in the prompt or the file's name.
const box = document.getElementById("filter");
function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (figure) => words.every((word) => figure.dataset.words.includes(word));
  let shown = 0, all = 0;
  for (const figure of document.querySelectorAll(".grid figure")) {
    figure.hidden = !fits(figure);
    all += 1;
    shown += figure.hidden ? 0 : 1;
  }
  for (const row of document.querySelectorAll(".row")) row.hidden = ![...row.querySelectorAll("figure")].some(fits);
  document.getElementById("found").textContent = words.length ? `${shown} of ${all} images` : "";
}
if (box) box.addEventListener("input", filter);

// The enlarged view.
const viewer = document.getElementById("viewer");
const large = viewer.querySelector("img");
let shown = null;
const neighbors = () => [...shown.closest("[data-group]").querySelectorAll("figure:not([hidden]) img[data-image]")];
function show(image) {
  shown = image;
  large.src = image.src; // at once; the original takes its place when it is there
  const { original, about } = image.dataset;
  if (original) {
    const full = new Image();
    full.onload = () => { if (shown === image && full.naturalWidth > large.naturalWidth) large.src = full.src; };
    full.src = original;
  }
  const link = viewer.querySelector("a");
  link.hidden = !original;
  if (original) link.href = original;
  viewer.querySelector(".prompt").textContent = image.closest("figure").querySelector(".prompt").textContent;
  const images = neighbors();
  viewer.querySelector(".about").textContent = `${about} · ${images.indexOf(image) + 1} of ${images.length}`;
  if (!viewer.open) viewer.showModal();
}
function step(by) {
  const images = neighbors();
  show(images[(images.indexOf(shown) + by + images.length) % images.length]);
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("figure > button");
  if (button) show(button.querySelector("img"));
});
viewer.querySelector(".previous").addEventListener("click", () => step(-1));
viewer.querySelector(".next").addEventListener("click", () => step(1));
viewer.querySelector(".close").addEventListener("click", () => viewer.close());
viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
viewer.addEventListener("close", () => shown.closest("button").focus());
viewer.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) { event.preventDefault(); step(by); }
});

// Charts, in the colors of the page, which follow light and dark.
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const runs = [0, 1, 2, 3, 4, 5].map((number) => color(`--run-${number}`));
  const charts = read("chart-data");
  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = charts[place.dataset.chart];
    const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true, fixedrange: true };
    chart.data.forEach((trace, number) => {
      trace.marker = { color: runs[number % 6] };
      if (chart.style === "steps") {
        trace.line = { color: runs[number % 6], width: 2, shape: "hvh" };
        trace.fillcolor = `${runs[number % 6]}33`;
      }
      if (chart.style === "bars") trace.marker.color = trace.x.map((_, bar) => runs[bar % 6]);
      if (trace.error_y) trace.error_y.color = color("--text");
    });
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text"), family: style.fontFamily, size: 13 },
      margin: { l: 50, r: 10, t: 10, b: 40 }, bargap: 0.35, legend: { orientation: "h", y: 1.15 }, dragmode: false,
      ...chart.layout, xaxis: { ...axis, ...chart.layout.xaxis }, yaxis: { ...axis, ...chart.layout.yaxis },
    };
    Plotly.react(place, chart.data, layout, { displayModeBar: false, responsive: true });
  }
}
draw();
dark.addEventListener("change", draw);
