"use strict";
// Bytes and durations as people write them.

function scaled(number, units, base) {
  const sign = number < 0 ? "-" : "";
  const size = Math.abs(number);
  for (const [unit, scale] of units) {
    if (size >= scale) {
      const value = size / scale;
      return sign + (value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))) + " " + unit;
    }
  }
  return sign + Math.round(size) + " " + base;
}

function bytes(number) {
  return scaled(number, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]], "B");
}

function time(number) {
  return scaled(number, [["s", 1e9], ["ms", 1e6], ["µs", 1e3]], "ns");
}

function part(one, whole) {
  return whole ? (one / whole * 100).toFixed(1) + " %" : "–";
}

function plural(count, word) {
  return count + " " + word + (count === 1 ? "" : "s");
}

// Make an element. Names can be hostile, so children are inserted as text and never parsed as markup.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  for (const child of children) made.append(child);
  return made;
}

// Return the marks of an axis. Their distance is 1, 2 or 5 times a power of ten; for bytes it is a power of two.
function ticksOf(low, high, wanted, binary) {
  const span = Math.max(high - low, 1);
  let step = binary ? 2 ** Math.ceil(Math.log2(span / wanted)) : 10 ** Math.floor(Math.log10(span / wanted));
  if (!binary) step *= [1, 2, 5, 10].find((factor) => step * factor >= span / wanted) || 10;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}
