"use strict";
// The data of the step for pictures and answers, from the columns of numbers in the page.

const step = JSON.parse(document.getElementById("numbers").textContent);
const names = step.names;
const kernels = step.kernels;
const moves = step.moves;
const waits = step.waits;
const end = Math.max(step.step, 1);

// Return the index of the last number that is at most `value`, or -1 if all numbers are larger.
function lastAt(ascending, value) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const totals = step.memory.at.map((_, at) => step.memory.bytes.reduce((sum, of) => sum + of[at], 0));

function groupBy(column) {
  const found = new Map();
  column.forEach((value, at) => found.has(value) ? found.get(value).push(at) : found.set(value, [at]));
  return found;
}

const movesOf = groupBy(moves.tensor);
const waitsOf = groupBy(waits.tensor);
const dropsOf = groupBy(step.drops.tensor);
const rowOf = new Map((step.tensors ? step.tensors.name : []).map((name, row) => [name, row]));

// Every tensor with a name: from the profile, from a move, or from a wait.
const known = [...new Set([...rowOf.keys(), ...movesOf.keys(), ...waitsOf.keys(), ...dropsOf.keys()])]
  .filter((name) => names[name]);

function isEvict(move) {
  return step.lanes[moves.lane[move]].track.startsWith("evict");
}

function tierOf(move) {
  const tier = step.lanes[moves.lane[move]].track.split(":")[1];
  return { ssd: "the SSD", host: "host memory" }[tier] || tier;
}

// Return the uses of a tensor in order: {tick, does}. Without a profile of this step return null.
function usesOf(name) {
  const row = rowOf.get(name);
  if (row === undefined) return null;
  const found = new Map();
  for (const tick of step.tensors.reads[row]) found.set(tick, "reads");
  for (const tick of step.tensors.writes[row]) found.set(tick, found.has(tick) ? "reads and writes" : "writes");
  return [...found].sort((one, other) => one[0] - other[0]).map(([tick, does]) => ({ tick, does }));
}

// Return the places of a tensor's bytes over time: {from, to, where}, where = device | moving | evicted. If
// two evictions have no fetch between them, the engine cancelled the first eviction.
function placesOf(name) {
  const events = [];
  for (const move of movesOf.get(name) || []) {
    events.push({ at: moves.start[move], to: moves.end[move], evicts: isEvict(move), move });
  }
  for (const drop of dropsOf.get(name) || []) {
    events.push({ at: step.drops.at[drop], to: step.drops.at[drop], evicts: true, move: -1 });
  }
  events.sort((one, other) => one.at - other.at);
  const row = rowOf.get(name);
  const uses = usesOf(name) || [];
  const born = row === undefined ? -1 : step.tensors.born[row];  // -1: it does not live around the step's end
  const temporary = row !== undefined && !step.tensors.persistent[row] && step.tensors.kind[row] !== "input"
    && born < 0;
  const from = temporary && uses.length ? kernels.start[uses[0].tick] : 0;
  const to = temporary && uses.length ? kernels.end[uses[uses.length - 1].tick] : end;
  const found = [];
  let at = from, where = events.length && !events[0].evicts ? "evicted" : "device";
  events.forEach((event, index) => {
    const next = events[index + 1];
    if (event.evicts && next && next.evicts) return;
    if (event.at > at) found.push({ from: at, to: event.at, where });
    if (event.to > event.at) found.push({ from: Math.max(event.at, at), to: event.to, where: "moving" });
    at = Math.max(event.to, at);
    where = event.evicts ? "evicted" : "device";
  });
  if (to > at) found.push({ from: at, to, where });
  if (born < 0) return found;
  const died = kernels.end[uses.filter((use) => use.tick < born).pop().tick], begins = kernels.start[born];
  return found.flatMap(({ from, to, where }) => [
    { from, to: Math.min(to, died), where }, { from: Math.max(from, begins), to, where },
  ].filter((place) => place.to > place.from));
}
