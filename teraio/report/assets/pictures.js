"use strict";
// Two pictures over the same time axis: the bytes on the device, and the kernels and transfers by lane.

const LEFT = 112, RIGHT = 14, AXIS = 26;
const view = { low: 0, high: end };
const shown = new Set(step.memory.kinds);
let marked = null;    // {at, to} of the selected item
let tensorInAnswer = null;     // number of the tensor in the answer

const colors = new Map();
function color(name) {
  if (!colors.has(name)) {
    const style = getComputedStyle(document.documentElement);
    colors.set(name, style.getPropertyValue("--" + name).trim() || style.getPropertyValue("--unknown").trim());
  }
  return colors.get(name);
}

function prepared(holder, height) {
  const canvas = holder.querySelector("canvas");
  const width = holder.clientWidth, ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height, plot: Math.max(width - LEFT - RIGHT, 10) };
}

function xOf(at, plot) {
  return LEFT + (at - view.low) / (view.high - view.low) * plot;
}

function timeAxis(area, bottom) {
  const { pen, plot } = area;
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const at of ticksOf(view.low, view.high, Math.max(plot / 110, 2), false)) {
    const x = xOf(at, plot);
    pen.fillStyle = color("grid");
    pen.fillRect(Math.round(x), 8, 1, bottom - 8);
    pen.fillStyle = color("quiet");
    if (x > LEFT + 8 && x < LEFT + plot - 12) pen.fillText(time(at), x, bottom + 6);
  }
}

function mark(area, bottom) {
  if (!marked) return;
  const { pen, plot } = area;
  const from = Math.max(xOf(marked.at, plot), LEFT), to = Math.min(xOf(marked.to, plot), LEFT + plot);
  if (to < LEFT || from > LEFT + plot) return;
  pen.globalAlpha = 0.16;
  pen.fillStyle = color("mark");
  pen.fillRect(from, 4, Math.max(to - from, 2), bottom - 4);
  pen.globalAlpha = 1;
  pen.fillRect(from - 0.5, 4, 1, bottom - 4);
}

// ---- memory

// Return for each column of pixels the moment with the most bytes, so that no peak falls between two pixels.
function fullest(at, sums, plot) {
  const found = [];
  let moment = Math.max(lastAt(at, view.low), 0);
  for (let x = 0; x < plot; x++) {
    const until = view.low + (x + 1) / plot * (view.high - view.low);
    let best = moment;
    while (moment + 1 < at.length && at[moment + 1] < until) {
      moment += 1;
      if (sums[moment] > sums[best]) best = moment;
    }
    found.push(best);
  }
  return found;
}

function drawMemory(holder) {
  const area = prepared(holder, 300);
  const { pen, plot, height } = area;
  const bottom = height - AXIS;
  const memory = step.memory;
  const visible = memory.kinds.map((kind, index) => ({ kind, index })).filter(({ kind }) => shown.has(kind));
  const peak = totals.reduce((most, total) => Math.max(most, total), 1);
  const predicted = step.predicted ? step.predicted.bytes.reduce((most, total) => Math.max(most, total), 0) : 0;
  const top = Math.max(peak, step.budget, predicted) * 1.08;
  const yOf = (size) => bottom - size / top * (bottom - 12);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const size of ticksOf(0, top, 5, true)) {
    pen.fillStyle = color("grid");
    pen.fillRect(LEFT, Math.round(yOf(size)), plot, 1);
    pen.fillStyle = color("quiet");
    pen.fillText(bytes(size), LEFT - 10, yOf(size));
  }
  timeAxis(area, bottom);
  if (memory.at.length) {
    const sums = memory.at.map((_, at) => visible.reduce((sum, { index }) => sum + memory.bytes[index][at], 0));
    const columns = fullest(memory.at, sums, Math.floor(plot));
    const base = new Float64Array(columns.length);
    for (const { kind, index } of visible) {
      pen.beginPath();
      columns.forEach((at, x) => pen.lineTo(LEFT + x, yOf(base[x] + memory.bytes[index][at])));
      for (let x = columns.length - 1; x >= 0; x--) pen.lineTo(LEFT + x, yOf(base[x]));
      pen.closePath();
      pen.fillStyle = color(kind);
      pen.fill();
      columns.forEach((at, x) => { base[x] += memory.bytes[index][at]; });
    }
  }
  if (step.predicted && step.predicted.at.length) drawPredicted(pen, plot, yOf);
  if (step.budget) {
    const y = Math.round(yOf(step.budget));
    pen.fillStyle = color("budget");
    for (let x = LEFT; x < LEFT + plot; x += 10) pen.fillRect(x, y, Math.min(6, LEFT + plot - x), 1.5);
    pen.textAlign = "right";
    pen.textBaseline = "bottom";
    pen.fillText("budget " + bytes(step.budget), LEFT + plot - 4, y - 3);
  }
  mark(area, bottom);
}

// Draw the predicted bytes, stretched to the length of this step so that kernels are aligned.
function drawPredicted(pen, plot, yOf) {
  const stretch = end / Math.max(step.predicted.step, 1);
  const at = step.predicted.at.map((moment) => moment * stretch);
  pen.beginPath();
  fullest(at, step.predicted.bytes, Math.floor(plot)).forEach((moment, x) => {
    pen.lineTo(LEFT + x, yOf(step.predicted.bytes[moment]));
  });
  pen.strokeStyle = color("predicted");
  pen.lineWidth = 1.5;
  pen.setLineDash([5, 3]);
  pen.stroke();
  pen.setLineDash([]);
}

// ---- lanes

const ROW = 22, THIN = 9, ROWS_MAX = 8;
// The bands of selectable items, from top to bottom. The items of a band are in order of time.
const bands = [
  { name: "compute", count: kernels.start.length, start: kernels.start, end: kernels.end, height: ROW },
  {
    name: "waiting", count: waits.start.length, start: waits.start, height: ROW,
    end: waits.start.map((at, wait) => at + waits.ns[wait]),
  },
  ...step.lanes.map((lane, number) => {
    const of = moves.lane.map((each, move) => each === number ? move : -1).filter((move) => move >= 0);
    const rows = Math.min(lane.rows, ROWS_MAX);
    return {
      name: lane.words, of, rows, count: of.length, height: rows > 1 ? rows * THIN + 2 : ROW,
      start: of.map((move) => moves.start[move]), end: of.map((move) => moves.end[move]),
      paint: lane.track.startsWith("evict") ? "evict" : "fetch",
    };
  }),
];
const GAP = 12;

function bandTops() {
  let y = tensorInAnswer === null ? 12 : 44;
  return bands.map((band) => { const top = y; y += band.height + GAP; return top; });
}

function lanesHeight() {
  const tops = bandTops();
  return tops[tops.length - 1] + bands[bands.length - 1].height + 10 + AXIS;
}

function bar(pen, plot, from, to, y, height) {
  const left = Math.max(xOf(from, plot), LEFT), right = Math.min(xOf(to, plot), LEFT + plot);
  if (right < LEFT || left > LEFT + plot) return 0;
  const width = Math.max(right - left, 0.75);
  pen.fillRect(left, y, width, height);
  return width;
}

function drawLanes(holder) {
  const area = prepared(holder, lanesHeight());
  const { pen, plot, height } = area;
  const bottom = height - AXIS;
  timeAxis(area, bottom);
  const tops = bandTops();
  pen.textBaseline = "middle";
  bands.forEach((band, number) => {
    const y = tops[number];
    pen.textAlign = "right";
    pen.fillStyle = color(number === row ? "ink" : "quiet");
    pen.fillText(band.name, LEFT - 10, y + band.height / 2);
    pen.fillStyle = color("grid");
    pen.fillRect(LEFT, y + band.height, plot, 1);
    drawBand(pen, plot, band, number, y);
  });
  if (tensorInAnswer !== null) drawPlaces(pen, plot, 12, 20, tensorInAnswer);
  mark(area, bottom);
}

function drawBand(pen, plot, band, number, y) {
  const hits = tensorInAnswer === null ? null : new Set(movesOf.get(tensorInAnswer) || []);
  const from = Math.max(0, number < 2 ? lastAt(band.start, view.low) : 0);
  for (let item = from; item < band.count && band.start[item] <= view.high; item++) {
    if (band.end[item] < view.low) continue;
    if (number === 0) {
      const odd = kernels.call.length ? kernels.call[item] % 2 : item % 2 && end / (view.high - view.low) > 8;
      pen.fillStyle = color(odd ? "kernel-other" : "kernel");
      const width = bar(pen, plot, band.start[item], band.end[item], y, band.height);
      if (width > 46) label(pen, names[kernels.name[item]], xOf(band.start[item], plot), y, width, band.height);
    } else if (number === 1) {
      pen.fillStyle = color("wait");
      bar(pen, plot, band.start[item], band.end[item], y, band.height);
    } else {
      const move = band.of[item];
      const thin = band.rows > 1;
      const top = thin ? y + moves.row[move] % band.rows * THIN : y;
      pen.globalAlpha = hits && !hits.has(move) ? 0.28 : 1;
      pen.fillStyle = color(band.paint);
      const tall = thin ? THIN - 2 : band.height;
      const width = bar(pen, plot, band.start[item], band.end[item], top, tall);
      if (!thin && width > 46) label(pen, names[moves.tensor[move]], xOf(band.start[item], plot), y, width, tall);
      pen.globalAlpha = 1;
    }
  }
}

function label(pen, text, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(Math.max(x, LEFT), y, width - 4, height);
  pen.clip();
  pen.fillStyle = color("panel");
  pen.textAlign = "left";
  pen.fillText(text, Math.max(x, LEFT) + 4, y + height / 2 + 0.5);
  pen.restore();
}

// Draw the places of the tensor in the answer: a full bar while resident, half in flight, a line while evicted.
function drawPlaces(pen, plot, y, height, name) {
  pen.textAlign = "right";
  pen.fillStyle = color("accent");
  pen.fillText("the tensor", LEFT - 10, y + height / 2);
  for (const place of placesOf(name)) {
    const [tall, alpha] = { device: [height, 1], moving: [height / 2, 0.6], evicted: [2, 0.8] }[place.where];
    pen.globalAlpha = alpha;
    pen.fillStyle = color("accent");
    bar(pen, plot, place.from, place.to, y + (height - tall) / 2, tall);
    pen.globalAlpha = 1;
  }
}
