// Helpers of all views. Texts from files reach the page as text nodes only: nothing is parsed as HTML.

const SVG = new Set(["svg", "polyline"]);

/** Create an element: element("p.note", {title}, "text", child, ...). */
export function element(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "style" && !SVG.has(tag)) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const tags = new Map();

/** Fetch JSON; null where it is unchanged since the last call with the same `slot`. */
export async function ask(path, parameters = {}, slot = null) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined));
  const address = `/api/${path}${query.size ? `?${query}` : ""}`;
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${answer.status} ${address}`);
  if (slot !== null) {
    const tag = `${address} ${answer.headers.get("etag")}`;
    if (tags.get(slot) === tag) return null;
    tags.set(slot, tag);
  }
  return answer.json();
}

/** Update the answers by run; returns whether any changed. */
export async function askRuns(path, runs, known) {
  const answers = await Promise.all(runs.map((run) => ask(path, { run }, `${path} ${run}`)));
  answers.forEach((news, place) => { if (news) known.set(runs[place], news); });
  return answers.some(Boolean);
}

/** Forget the last answer of a slot, so that the next one is returned. */
export const forget = (slot) => tags.delete(slot);

export const fileAddress = (path) => `/files/${path.split("/").map(encodeURIComponent).join("/")}`;
export const thumbAddress = (path, side) => `/thumb?${new URLSearchParams({ path, side })}`;
export const joined = (...parts) => parts.filter((part) => part && part !== ".").join("/");

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Format a number with few digits. */
export function short(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(digits)));
}

/** Write a setting with all its digits, as people do: 8e-5, 7,097,472. */
export function written(value) {
  if (value === null || value === undefined || value === "" || value.length === 0) return "–";
  if (Array.isArray(value)) return value.map(written).join(", ");
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  return value && Math.abs(value) < 1e-3 ? value.toExponential() : value.toLocaleString("en-US", { maximumFractionDigits: 20 });
}

export const percent = (value, digits = 3) => (value === null || value === undefined ? "–" : `${short(value * 100, digits)}%`);

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const ago = (time) => {
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
};

/** Return the parent and the last part of a path. */
export function nameOf(id, rootName) {
  if (id === ".") return ["", rootName];
  const cut = id.lastIndexOf("/") + 1;
  return [id.slice(0, cut), id.slice(cut)];
}

/** Create a radio group of buttons. */
export function choice(label, options, chosen, changed) {
  const group = element("div.choice", { role: "radiogroup", "aria-label": label });
  for (const [value, text] of options) {
    group.append(element("button", {
      type: "button", role: "radio", "aria-checked": String(value === chosen), "data-value": value,
      onclick: () => { choose(group, value); changed(value); },
    }, text));
  }
  return group;
}

export function choose(group, value) {
  for (const button of group.children) button.setAttribute("aria-checked", String(button.dataset.value === value));
}

/** Call `draw` unless the content is the same as in the last call for this owner. */
export function redraw(owner, content, draw) {
  const text = JSON.stringify(content);
  if (owner.drawn === text) return null;
  owner.drawn = text;
  return draw();
}

/** Return a function that calls `work` at most once per frame. */
export function framed(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; work(); });
  };
}
