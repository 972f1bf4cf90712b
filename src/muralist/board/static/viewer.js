// An image in full size, or two side by side, with its prompt and facts.

import { ask, element, fileAddress } from "./tools.js";

const viewer = document.getElementById("viewer");
let source = null;
let place = null;
let shows = 0;

/** Open at a place. `from.at(place)` gives {images: [{path, label, thumb}], prompt, facts}; `from.move(place, x, y)` the next place. */
export function enlarge(from, at) {
  source = from;
  go(at);
  if (!viewer.open) viewer.showModal();
}

export const isEnlarged = () => viewer.open;

async function go(to) {
  if (to === null || to === undefined) return;
  place = to;
  const mine = (shows += 1);
  const shown = await source.at(place);
  if (mine !== shows || !shown) return;
  const { images, prompt, facts } = shown;
  viewer.querySelector(".images").replaceChildren(...images.map(({ path, label, thumb, alt }) => {
    const image = element("img", { alt: alt ?? prompt, src: thumb });
    const full = new Image();
    full.onload = () => {
      image.src = full.src;
      image.classList.toggle("pixels", Math.max(full.naturalWidth, full.naturalHeight) <= 160);
    };
    full.src = fileAddress(path);
    return element("figure", {}, element("a", { href: fileAddress(path), target: "_blank", title: "Open the file" }, image), label ? element("figcaption", {}, label) : null);
  }));
  viewer.querySelector(".prompt").textContent = prompt;
  const line = viewer.querySelector(".facts");
  line.textContent = facts.join(" · ");
  const found = await ask("facts", { path: images[0].path }).catch(() => ({}));
  if (mine !== shows) return;
  const more = [found.width ? `${found.width} × ${found.height}` : null, found.seed && !facts.some((fact) => fact.startsWith("seed")) ? `seed ${found.seed}` : null];
  line.textContent = [...facts, ...more.filter(Boolean), images[0].path].join(" · ");
}

const move = (x, y) => go(source.move(place, x, y));
viewer.querySelector(".previous").addEventListener("click", () => move(-1, 0));
viewer.querySelector(".next").addEventListener("click", () => move(1, 0));
viewer.querySelector(".close").addEventListener("click", () => viewer.close());
viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
viewer.addEventListener("close", () => { shows += 1; source.closed?.(place); });
viewer.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (by) { event.preventDefault(); event.stopPropagation(); move(...by); }
});
