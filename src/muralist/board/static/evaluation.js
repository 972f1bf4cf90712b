// Evaluations: their scores in one table, and a link to the page of each.

import { ago, count, element, fileAddress, nameOf, redraw, short } from "./tools.js";
import { NOTHING, noteOf } from "./list.js";
import { state } from "./state.js";

let page = null;

export const evaluation = {
  open(view) {
    page = { note: element("p.note"), table: element("div.wide.card") };
    view.replaceChildren(page.note, page.table);
  },
  close() { page = null; },
  poll: (overview) => redraw(page, [overview.evaluation, state.focus.evaluation], () => draw(overview)),
};

function draw(overview) {
  const found = overview.evaluation;
  page.table.hidden = !found.length;
  page.note.replaceChildren(...noteOf(found.length ? "" : NOTHING.evaluation));
  const known = Object.keys(overview.metrics);
  const metrics = [...new Set(found.flatMap((one) => Object.keys(one.scores)))]
    .sort((a, b) => (known.indexOf(a) + 100) % 100 - (known.indexOf(b) + 100) % 100);
  const heads = ["Evaluation", ...metrics.map((metric) => overview.metrics[metric]?.[0] ?? metric), "Images", "Page"];
  page.table.replaceChildren(element("table.scores", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {}, head)))),
    element("tbody", {}, ...found.map((one) => row(one, metrics, found, overview)))));
}

function row(one, metrics, all, overview) {
  const [before, name] = nameOf(one.id, overview.name);
  const page = one.page ? element("a", { href: fileAddress(one.page), target: "_blank", rel: "noopener" }, "open the report") : "–";
  return element("tr", { "aria-selected": String(one.id === state.focus.evaluation) },
    element("th", { scope: "row" }, element("span.name", {}, element("small", {}, before), name), element("small", {}, ` ${ago(one.changed)}`), ...one.warnings.slice(0, 2).map((text) => element("p.remark", {}, ...noteOf(text)))),
    ...metrics.map((metric) => element("td", {}, ...score(one, metric, all, overview.metrics[metric]?.[1]))), element("td", {}, count(one.images)), element("td", {}, page));
}

function score(one, metric, all, higherIsBetter) {
  const found = one.scores[metric];
  if (!found) return ["–"];
  const values = all.map((other) => other.scores[metric]?.value).filter((value) => value !== undefined);
  const sign = higherIsBetter ? 1 : -1;
  const best = higherIsBetter !== undefined && values.length > 1 && values.every((value) => sign * value <= sign * found.value);
  const interval = found.low !== null && found.high !== null ? element("small", {}, `${short(found.low)} – ${short(found.high)}`) : null;
  return [element(best ? "b.best" : "b", {}, short(found.value)), interval].filter(Boolean);
}
