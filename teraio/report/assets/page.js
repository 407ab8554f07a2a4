"use strict";
// Keys, pointer, search and theme. Both pictures share one selection: an item of a band.

const memoryPicture = document.getElementById("memory-picture");
const lanesPicture = document.getElementById("lanes-picture");
const selectedLine = document.getElementById("selected");
const tip = document.getElementById("tip");
let row = 0, item = -1, drawing = false;

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawMemory(memoryPicture);
    drawLanes(lanesPicture);
    document.getElementById("window").textContent = view.low <= 0 && view.high >= end ? ""
      : time(view.low) + " to " + time(view.high);
  });
}

// ---- descriptions

function describe(band, at) {
  if (band === 0) {
    const length = time(kernels.end[at] - kernels.start[at]);
    return kernelWords(at) + ": runs for " + length + " from " + time(kernels.start[at]);
  }
  if (band === 1) {
    return "compute waits " + time(waits.ns[at]) + " for " + names[waits.tensor[at]] + " at " + time(waits.start[at])
      + ", before " + kernelWords(waits.tick[at] % Math.max(kernels.name.length, 1)) + "; cause: "
      + names[waits.cause[at]];
  }
  const move = bands[band].of[at];
  const took = moves.end[move] - moves.start[move];
  return names[moves.tensor[move]] + ": " + bytes(moves.bytes[move]) + " " + bands[band].name + " in " + time(took)
    + " from " + time(moves.start[move]);
}

function tensorAt(band, at) {
  if (at < 0) return null;
  return band === 1 ? waits.tensor[at] : band > 1 ? moves.tensor[bands[band].of[at]] : null;
}

function memoryAt(at) {
  const moment = lastAt(step.memory.at, at);
  if (moment < 0) return "";
  const held = step.memory.kinds.map((_, index) => [step.memory.words[index], step.memory.bytes[index][moment]]);
  return bytes(totals[moment]) + " on the device: "
    + held.filter((each) => each[1]).map(([word, size]) => word + " " + bytes(size)).join(", ");
}

function select(band, at, move) {
  row = band;
  item = at;
  const { start, end: ends } = bands[band];
  marked = at < 0 ? null : { at: start[at], to: ends[at] };
  if (marked && move) bringIntoView(marked);
  selectedLine.textContent = at < 0 ? "Nothing is selected."
    : describe(band, at) + ". " + memoryAt(start[at]) + ".";
  draw();
}

function bringIntoView({ at, to }) {
  const width = view.high - view.low;
  if (at >= view.low && to <= view.high) return;
  look((at + to) / 2 - width / 2, (at + to) / 2 + width / 2);
}

function look(low, high) {
  const width = Math.min(Math.max(high - low, 50), end);
  view.low = Math.min(Math.max(low, 0), end - width);
  view.high = view.low + width;
  draw();
}

function zoom(factor, around) {
  const at = around === undefined ? (marked ? (marked.at + marked.to) / 2 : (view.low + view.high) / 2) : around;
  const width = (view.high - view.low) * factor;
  const ratio = (at - view.low) / (view.high - view.low);
  const before = ratio >= 0 && ratio <= 1 ? ratio : 0.5;
  look(at - width * before, at + width * (1 - before));
}

// ---- keys

function nearest(band, at) {
  const { start, count } = bands[band];
  return count ? Math.min(Math.max(lastAt(start, at), 0), count - 1) : -1;
}

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const at = marked ? marked.at : view.low;
  const last = bands[row].count - 1;
  const acts = {
    ArrowRight: () => select(row, item < 0 ? nearest(row, at) : Math.min(item + 1, last), true),
    ArrowLeft: () => select(row, item < 0 ? nearest(row, at) : Math.max(item - 1, 0), true),
    ArrowDown: () => onRow(1, at),
    ArrowUp: () => onRow(-1, at),
    Home: () => select(row, last < 0 ? -1 : 0, true),
    End: () => select(row, last, true),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    "0": () => look(0, end),
    Enter: () => { const name = tensorAt(row, item); if (name !== null) answer(name); },
    Escape: () => select(row, -1),
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

function onRow(by, at) {
  let next = row;
  do next = (next + by + bands.length) % bands.length; while (!bands[next].count && next !== row);
  select(next, nearest(next, at), true);
}

for (const picture of [memoryPicture, lanesPicture]) picture.addEventListener("keydown", onKey);

function onWait(by) {
  if (!bands[1].count) return;
  const next = row === 1 && item >= 0 ? item + by : nearest(1, marked ? marked.at : 0);
  select(1, (next + bands[1].count) % bands[1].count, true);
}

document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
document.getElementById("zoom-all").addEventListener("click", () => look(0, end));
document.getElementById("previous-wait").addEventListener("click", () => onWait(-1));
document.getElementById("next-wait").addEventListener("click", () => onWait(1));

// ---- pointer

function timeAt(event, picture) {
  const box = picture.getBoundingClientRect();
  const plot = Math.max(picture.clientWidth - LEFT - RIGHT, 10);
  return view.low + (event.clientX - box.left - LEFT) / plot * (view.high - view.low);
}

// Return the band and the item under the pointer. An item also counts as hit within three pixels of its
// edges.
function itemAt(event) {
  const y = event.clientY - lanesPicture.getBoundingClientRect().top;
  const tops = bandTops();
  const band = bands.findIndex((each, number) => y >= tops[number] - 2 && y <= tops[number] + each.height + 2);
  if (band < 0) return null;
  const at = timeAt(event, lanesPicture);
  const slack = 3 * (view.high - view.low) / Math.max(lanesPicture.clientWidth - LEFT - RIGHT, 10);
  const { start, end: ends, count, rows } = bands[band];
  const wanted = rows > 1 ? Math.floor((y - tops[band]) / THIN) : -1;
  const last = Math.min(lastAt(start, at + slack), count - 1);
  let best = null, distance = slack;
  for (let index = last; index >= Math.max(0, last - 64); index--) {
    if (wanted >= 0 && moves.row[bands[band].of[index]] % rows !== wanted) continue;
    const gap = at < start[index] ? start[index] - at : at > ends[index] ? at - ends[index] : 0;
    if (gap < distance) { distance = gap; best = index; }
  }
  return best === null ? null : { band, item: best };
}

function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const { clientWidth, clientHeight } = document.documentElement;
  tip.style.left = Math.max(8, Math.min(event.clientX + 14, clientWidth - tip.offsetWidth - 8)) + "px";
  const below = event.clientY + 18;
  tip.style.top = (below + tip.offsetHeight > clientHeight ? event.clientY - tip.offsetHeight - 12 : below) + "px";
}

function tipFor(picture, event) {
  const at = timeAt(event, picture);
  if (at < view.low || at > view.high) return "";
  if (picture === memoryPicture) {
    const kernel = lastAt(kernels.start, at);
    return time(at) + (kernel >= 0 ? ", " + kernelWords(kernel) : "") + "\n" + memoryAt(at).split(/[:,] /).join("\n");
  }
  const hit = itemAt(event);
  return hit ? describe(hit.band, hit.item) : "";
}

for (const picture of [memoryPicture, lanesPicture]) {
  let held = null;
  picture.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, low: view.low, high: view.high, moved: false };
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    if (!held) return showTip(event, tipFor(picture, event));
    const plot = Math.max(picture.clientWidth - LEFT - RIGHT, 10);
    const by = (event.clientX - held.x) / plot * (held.high - held.low);
    held.moved = held.moved || Math.abs(event.clientX - held.x) > 4;
    if (held.moved) { showTip(event, ""); look(held.low - by, held.high - by); }
  });
  picture.addEventListener("pointerup", (event) => {
    const click = held && !held.moved;
    held = null;
    if (!click) return;
    const hit = picture === lanesPicture ? itemAt(event) : null;
    if (hit) select(hit.band, hit.item);
    else if (picture === memoryPicture) select(0, nearest(0, timeAt(event, picture)));
  });
  picture.addEventListener("pointercancel", () => { held = null; });
  picture.addEventListener("pointerleave", (event) => showTip(event, ""));
  picture.addEventListener("dblclick", () => {
    if (item >= 0 && tensorAt(row, item) !== null) answer(tensorAt(row, item));
  });
  picture.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event, picture));
  }, { passive: false });
}

// ---- the legend

const legend = document.getElementById("kinds");
step.memory.kinds.forEach((kind, index) => {
  const button = element("button", { type: "button", "aria-pressed": "true" }, step.memory.words[index]);
  const known = getComputedStyle(document.documentElement).getPropertyValue("--" + kind);
  button.style.setProperty("--of", "var(--" + (known ? kind : "unknown") + ")");
  button.addEventListener("click", () => {
    if (shown.has(kind)) shown.delete(kind); else shown.add(kind);
    button.setAttribute("aria-pressed", String(shown.has(kind)));
    draw();
  });
  legend.append(button);
});
if (step.predicted) legend.append(element("span", {}, "dashed: predicted bytes"));

// ---- the answer

const query = document.getElementById("query");
const list = document.getElementById("found");
const answered = document.getElementById("answer");
let chosen = -1, offered = [];

function offer() {
  offered = lookUp(query.value, 40);
  chosen = offered.length ? 0 : -1;
  list.replaceChildren(...offered.map((name, at) => {
    const about = { role: "option", id: "found-" + at, "aria-selected": String(at === chosen) };
    const option = element("li", about, names[name]);
    option.addEventListener("pointerdown", (event) => { event.preventDefault(); answer(name); });
    return option;
  }));
  openList(offered.length > 0);
}

function openList(open) {
  list.hidden = !open;
  query.setAttribute("aria-expanded", String(open));
  if (open && chosen >= 0) query.setAttribute("aria-activedescendant", "found-" + chosen);
  else query.removeAttribute("aria-activedescendant");
}

function choose(by) {
  if (list.hidden || !offered.length) return offer();
  list.children[chosen].setAttribute("aria-selected", "false");
  chosen = (chosen + by + offered.length) % offered.length;
  list.children[chosen].setAttribute("aria-selected", "true");
  list.children[chosen].scrollIntoView({ block: "nearest" });
  openList(true);
}

query.addEventListener("input", offer);
query.addEventListener("blur", () => openList(false));
query.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    choose(event.key === "ArrowDown" ? 1 : -1);
  } else if (event.key === "Enter") {
    event.preventDefault();
    if (list.hidden) offer();
    if (chosen >= 0) answer(offered[chosen]);
    else answered.replaceChildren(element("p", {}, "No tensor of this step has this name."));
  } else if (event.key === "Escape") {
    if (list.hidden) { query.value = ""; forget(); }
    openList(false);
  }
});

function forget() {
  tensorInAnswer = null;
  answered.replaceChildren();
  draw();
}

function answer(name) {
  tensorInAnswer = name;
  query.value = names[name];
  openList(false);
  const head = element("tr", {});
  for (const word of ["when", "what", "why"]) head.append(element("th", { scope: "col" }, word));
  const rows = storyOf(name).map((each) => {
    const line = element("tr", {}, element("th", { scope: "row" }, time(each.at)));
    line.append(element("td", {}, each.what), element("td", {}, each.why));
    return line;
  });
  const close = element("button", { type: "button" }, "Close");
  close.addEventListener("click", () => { forget(); query.value = ""; query.focus(); });
  const table = element("table", { class: "words" }, element("caption", {}, "Uses and moves of the tensor in this step"));
  table.append(element("thead", {}, head), element("tbody", {}, ...rows));
  const scrolls = { class: "scroll", tabindex: "0", role: "group", "aria-label": "Uses and moves" };
  answered.replaceChildren(
    element("h3", {}, names[name]),
    ...sentencesOf(name).map((sentence) => element("p", {}, sentence)),
    ...(rows.length ? [element("div", scrolls, table)] : []),
    close,
  );
  const first = (movesOf.get(name) || [])[0];
  if (first !== undefined) {
    const band = 2 + moves.lane[first];
    select(band, bands[band].of.indexOf(first), true);
  }
  draw();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest && event.target.closest("button.tensor");
  if (!button) return;
  const name = names.indexOf(button.dataset.tensor);
  if (name < 0) return;
  answer(name);
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  document.getElementById("find").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
  query.focus({ preventScroll: true });
});

// ---- theme

const THEMES = ["system", "light", "dark"];
const button = document.getElementById("theme");
let theme = 0;
button.addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  button.textContent = "Theme: " + THEMES[theme];
  if (theme) document.documentElement.dataset.theme = THEMES[theme];
  else delete document.documentElement.dataset.theme;
  colors.clear();
  draw();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colors.clear(); draw(); });
new ResizeObserver(draw).observe(lanesPicture);
draw();
