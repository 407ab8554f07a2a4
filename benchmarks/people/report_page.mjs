// Opens a report in a real browser. Measures load time, keyboard access and axe-core's accessibility
// violations, and takes pictures of the light and the dark theme. Arguments: page, browser, folder of node
// modules, folder for pictures or "". Prints one JSON object.
import { createRequire } from "node:module";

const [page, browser, modules, pictures] = process.argv.slice(2);
const require = createRequire(modules + "/");
const { chromium } = require("playwright-core");
let axe = null;
try { axe = require.resolve("axe-core/axe.min.js"); } catch { /* reported as not looked for */ }

const launched = await chromium.launch({ executablePath: browser, args: ["--no-sandbox"] });
const told = { errors: [], requests: [], violations: axe ? [] : null };

async function open(scheme, bypassCSP) {
  const size = { width: 1280, height: 860 };
  const shown = await launched.newContext({ colorScheme: scheme, viewport: size, bypassCSP, reducedMotion: "reduce" });
  const tab = await shown.newPage();
  tab.on("pageerror", (error) => told.errors.push(error.message));
  tab.on("console", (line) => { if (line.type() === "error") told.errors.push(line.text()); });
  tab.on("request", (request) => { if (request.url() !== "file://" + page) told.requests.push(request.url()); });
  await tab.goto("file://" + page);
  await tab.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  return tab;
}

async function loads() {
  const tab = await open("light", false);
  const ms = await tab.evaluate(() => {
    const { domContentLoadedEventEnd, loadEventEnd } = performance.getEntriesByType("navigation")[0];
    return { ready: domContentLoadedEventEnd, loaded: loadEventEnd, drawn: performance.now() };
  });
  await tab.context().close();
  return ms;
}

await loads();  // a first load, which warms the browser up
const times = [];
for (let round = 0; round < 5; round++) times.push(await loads());
const middle = (key) => Math.round(times.map((each) => each[key]).sort((a, b) => a - b)[2]);
told.load_ms = { ready: middle("ready"), loaded: middle("loaded"), drawn: middle("drawn") };

const tab = await open("light", false);
// Time one redraw of both pictures, from a key to the next frame.
await tab.focus("#lanes-picture");
told.key_ms = await tab.evaluate(async () => {
  const took = [];
  for (const key of ["+", "+", "ArrowRight", "ArrowRight", "-", "0"]) {
    const began = performance.now();
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    took.push(performance.now() - began);
  }
  return Math.round(Math.max(...took));
});
// Record the elements that Tab reaches, in order, until the focus returns to the start.
const fresh = await open("light", false);
told.reached = [];
for (let count = 0; count < 60; count++) {
  await fresh.keyboard.press("Tab");
  const at = await fresh.evaluate(() => {
    const here = document.activeElement;
    return here === document.body ? "" : here.id || here.className || here.tagName.toLowerCase();
  });
  if (!at) break;
  told.reached.push(at);
}
await fresh.context().close();
// Check that arrow keys print the selected element.
await tab.focus("#lanes-picture");
const said = [];
for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight"]) {
  await tab.keyboard.press(key);
  said.push(await tab.textContent("#selected"));
}
told.selected = said;
const name = await tab.evaluate(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const found = numbers.names.find((each) => each.endsWith(".exp_avg_sq") && each.includes("up"));
  return (found || numbers.names[numbers.moves.tensor[0]] || "").replace(/\.exp_avg_sq$/, "’s second moment");
});
await tab.fill("#query", name);
await tab.keyboard.press("Enter");
told.asked = name;
told.answered = await tab.evaluate(() => [...document.querySelectorAll("#answer p")].map((each) => each.textContent));
await tab.context().close();

if (axe) {
  for (const scheme of ["light", "dark"]) {
    const looked = await open(scheme, true);
    await looked.fill("#query", name);
    await looked.keyboard.press("Enter");
    await looked.addScriptTag({ path: axe });
    const found = await looked.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
    for (const each of found.violations) {
      told.violations.push(scheme + ": " + each.id + " (" + each.impact + "): " + each.help + ": "
        + each.nodes.slice(0, 3).map((node) => node.target.join(" ")).join(", "));
    }
    await looked.context().close();
  }
}
if (pictures) {
  for (const scheme of ["light", "dark"]) {
    const shot = await open(scheme, false);
    if (scheme === "dark") {
      await shot.fill("#query", name);
      await shot.keyboard.press("Enter");
      await shot.evaluate(() => {
        document.activeElement.blur();
        document.getElementById("lanes-title").scrollIntoView();
      });
      await shot.waitForTimeout(100);
    }
    await shot.screenshot({ path: pictures + "/report-" + scheme + ".png" });
    await shot.context().close();
  }
}
await launched.close();
console.log(JSON.stringify(told));
