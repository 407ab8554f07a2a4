"use strict";
// The search for a tensor by name, and the answer in words: the places of the tensor over time, with reasons.

const ASIDE = new Set(["where", "is", "the", "of", "s", "when", "why", "what", "and", "a", "its", "tensor", "weight"]
  .concat(["was", "does", "it", "did", "go"]));
const MEANT = [
  ["exp_avg_sq", ["second moment", "2nd moment", "variance"]],
  ["exp_avg", ["first moment", "1st moment", "momentum", "optimizer state"]],
  ["grad", ["gradient"]],
];

// Return the tensors whose names contain all words of the question, the likeliest first.
function lookUp(question, most) {
  let text = question.toLowerCase().replace(/[’']s\b/g, " ").replace(/[?!,"“”]/g, " ");
  for (const [name, others] of MEANT) {
    for (const other of others) text = text.split(other).join(" " + name + " ");
  }
  const words = text.split(/\s+/).filter((word) => word && !ASIDE.has(word));
  if (!words.length) return [];
  const found = [];
  for (const index of known) {
    const name = names[index].toLowerCase();
    if (!words.every((word) => name.includes(word))) continue;
    const ends = words.includes("exp_avg") && name.endsWith("exp_avg_sq") ? 1 : 0;
    const exact = words.some((word) => name === word) ? -1 : 0;
    found.push([exact + ends, name.length, index]);
  }
  found.sort((one, other) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2]);
  return found.slice(0, most).map((each) => each[2]);
}

function kernelWords(tick) {
  const name = names[kernels.name[tick]];
  if (name === undefined) return "tick " + tick;
  if (name === "exit") return "your own code between two programs (tick " + tick + ")";
  if (name === "enter") return "the start of a program (tick " + tick + ")";
  return name + " (tick " + tick + ")";
}

// Return the next use at or after a moment, or the first use in the next step.
function nextUse(uses, at) {
  const found = uses.find((use) => kernels.start[use.tick] >= at);
  return found ? { ...found, next: false } : uses.length ? { ...uses[0], next: true } : null;
}

function reasonForEviction(uses, at) {
  if (!uses) return "other tensors needed its memory";
  const next = nextUse(uses, at);
  if (!next) return "nothing in this step uses it";
  const gap = (next.next ? end - at + kernels.start[next.tick] : kernels.start[next.tick] - at);
  return "not needed until " + kernelWords(next.tick) + (next.next ? " of the next step, " : ", ") + time(gap)
    + " later: other tensors use its memory meanwhile";
}

function reasonForFetch(uses, at, name) {
  const miss = (waitsOf.get(name) || []).find((wait) => names[waits.cause[wait]] === "miss"
    && waits.start[wait] + waits.ns[wait] >= at - 1e6 && waits.start[wait] <= at + waits.ns[wait] + 1e6);
  const next = uses && nextUse(uses, at);
  const needed = next ? "needed by " + kernelWords(next.tick) + (next.next ? " of the next step" : "") : "needed";
  return miss === undefined ? needed : needed + "; no plan asked for this fetch";
}

// Return the rows of the table, in order of time: {at, order, what, why}.
function storyOf(name) {
  const uses = usesOf(name);
  const rows = [];
  for (const use of uses || []) {
    const what = kernelWords(use.tick) + " " + use.does + " it";
    rows.push({ at: kernels.start[use.tick], order: 2, what, why: "" });
  }
  for (const move of movesOf.get(name) || []) {
    const took = time(moves.end[move] - moves.start[move]);
    const way = isEvict(move) ? "is evicted to " + tierOf(move) : "is fetched from " + tierOf(move);
    rows.push({
      at: moves.start[move], order: 1, what: way + ", " + bytes(moves.bytes[move]) + " in " + took,
      why: isEvict(move) ? reasonForEviction(uses, moves.start[move]) : reasonForFetch(uses, moves.start[move], name),
    });
  }
  for (const drop of dropsOf.get(name) || []) {
    const at = step.drops.at[drop];
    rows.push({ at, order: 1, what: "is dropped: an equal copy exists", why: reasonForEviction(uses, at) });
  }
  for (const wait of waitsOf.get(name) || []) {
    rows.push({
      at: waits.start[wait], order: 0, what: "compute waits " + time(waits.ns[wait]) + " for it",
      why: names[waits.cause[wait]],
    });
  }
  return rows.sort((one, other) => one.at - other.at || one.order - other.order);
}

function sentencesOf(name) {
  const row = rowOf.get(name);
  const places = placesOf(name);
  const sentences = [];
  const lengthOf = (some) => some.reduce((sum, place) => sum + place.to - place.from, 0);
  const life = lengthOf(places), evicted = lengthOf(places.filter((place) => place.where === "evicted"));
  const words = { device: "resident", evicted: "evicted", moving: "in flight" };
  const size = row === undefined
    ? Math.max(0, ...(movesOf.get(name) || []).map((move) => moves.bytes[move])) : step.tensors.bytes[row];
  const kind = row === undefined ? "" : { state: "optimizer state", grad: "gradient" }[step.tensors.kind[row]]
    || step.tensors.kind[row];
  const article = "aeio".includes(kind[0] || "t") ? "An " : "A ";
  sentences.push(article + (kind || "tensor") + (size ? " of " + bytes(size) : "") + ".");
  if (places.length) {
    const begins = row !== undefined && places[0].from > 0 ? "It is created at " + time(places[0].from)
      : "It is " + words[places[0].where] + " when the step begins";
    sentences.push(begins + ", and evicted for " + part(evicted, life) + " of its life in this step.");
  }
  const times = (movesOf.get(name) || []).length;
  const waited = (waitsOf.get(name) || []).reduce((sum, wait) => sum + waits.ns[wait], 0);
  sentences.push((times ? "It moves " + plural(times, "time") : "It never moves") + "; "
    + (waited ? "compute waits " + time(waited) + " for it." : "compute never waits for it."));
  return sentences;
}
