"use strict";
// Only texts and attributes that the page already holds are moved around here: nothing is ever parsed as HTML.
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const thumbnails = read("thumbnail-data");
const metrics = read("metric-data");
for (const image of all("img[data-image]")) {
  image.decoding = "async";
  image.src = thumbnails[image.dataset.image];
}

const scores = new Map();
for (const figure of all("figure[data-scores]")) scores.set(figure, JSON.parse(figure.dataset.scores));
const value = (figure, key) => scores.get(figure)?.[key];
function text(key, number) {
  const shown = number.toFixed(metrics[key].decimals);
  return Number(shown) === 0 ? shown.replace("-", "") : shown.replace("-", "−"); // -0 is 0
}

// The toolbar: which images are shown, in which order, with which score.
const box = document.getElementById("filter");
const category = document.getElementById("category");
const metric = document.getElementById("metric");
let order = "";

function filter() {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = category?.value;
  const fits = (figure) => words.every((word) => figure.dataset.words.includes(word)) &&
    (!chosen || JSON.parse(figure.dataset.categories ?? "[]").includes(chosen));
  const figures = all(".grid figure");
  for (const figure of figures) figure.hidden = !fits(figure);
  for (const row of all(".row")) row.hidden = !all("figure", row).some(fits);
  const shown = figures.filter((figure) => !figure.hidden).length;
  document.getElementById("found").textContent = words.length || chosen ? `${shown} of ${figures.length} images` : "";
}

// Figures without a score come last. A row is ranked by what its last run gains over its first.
function sort() {
  const key = metric?.value;
  const gain = (row) => {
    const [first, ...others] = all("figure", row).map((figure) => value(figure, key));
    return others.at(-1) - first;
  };
  const rank = (element) => element.matches("figure") ? value(element, key) : gain(element);
  for (const place of all(".grid, .rows")) {
    const elements = [...place.children];
    elements.forEach((element, index) => { element.dataset.place ??= index; });
    const sign = order === "best" ? -1 : 1;
    const ranked = elements.map((element) => {
      const found = order ? rank(element) : Number(element.dataset.place);
      return [Number.isFinite(found) ? (order ? sign : 1) * found : Infinity, element];
    });
    place.append(...ranked.sort((a, b) => a[0] - b[0]).map(([, element]) => element));
  }
  for (const button of all("[data-order]")) button.setAttribute("aria-pressed", String(button.dataset.order === order));
  for (const [figure] of scores) {
    const found = value(figure, key);
    figure.querySelector(".badge").textContent = found === undefined ? "" : text(key, found);
  }
}

if (box) {
  box.addEventListener("input", filter);
  category?.addEventListener("change", filter);
  metric?.addEventListener("change", sort);
  if (metric) sort();
}
document.addEventListener("click", (event) => {
  const zoom = event.target.closest(".zoom");
  const ordering = event.target.closest("[data-order], [data-worst]");
  const pick = event.target.closest("[data-category]");
  if (zoom) show(zoom.querySelector("img"));
  if (ordering) {
    order = ordering.dataset.order ?? "worst";
    sort();
  }
  if (pick) {
    category.value = pick.dataset.category;
    filter();
    box.closest("section").scrollIntoView();
  }
});

// The enlarged view.
const viewer = document.getElementById("viewer");
const large = viewer.querySelector("img");
let shown = null;
const neighbors = () => all("figure:not([hidden]) img[data-image]", shown.closest("[data-group]"));
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
  const figure = image.closest("figure");
  viewer.querySelector(".prompt").textContent = figure.querySelector(".prompt").textContent;
  const known = [...(metric?.options ?? [])].filter((option) => value(figure, option.value) !== undefined);
  const chips = known.map((option) => {
    const chip = document.createElement("span");
    chip.textContent = `${option.text} ${text(option.value, value(figure, option.value))}`;
    return chip;
  });
  viewer.querySelector(".chips").replaceChildren(...chips);
  const images = neighbors();
  viewer.querySelector(".about").textContent = `${about} · ${images.indexOf(image) + 1} of ${images.length}`;
  if (!viewer.open) viewer.showModal();
}
function step(by) {
  const images = neighbors();
  show(images[(images.indexOf(shown) + by + images.length) % images.length]);
}
viewer.querySelector(".previous").addEventListener("click", () => step(-1));
viewer.querySelector(".next").addEventListener("click", () => step(1));
viewer.querySelector(".close").addEventListener("click", () => viewer.close());
viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
viewer.addEventListener("close", () => shown.closest("button").focus());
viewer.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) { event.preventDefault(); step(by); }
});
