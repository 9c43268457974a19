// Plots of the last hour. In: /debug/history, in the interval of its samples. Out: a small SVG for each series. The
// samples are the process's: a page that is opened late shows them all, and a restart of the process clears them.

import { attribute, byId, make, partOf, slot, sync, text } from "./dom.js";
import { bytes, micros, number } from "./format.js";
import { ask } from "./process.js";

const HOUR_MS = 3_600_000;
const SHORTEST_MS = 300_000; // A process that is younger has its plot at the right.
const WIDTH = 360;
const HEIGHT = 64;
const TOP = 3; // So that the line of the largest value is not cut.
const SVG = "http://www.w3.org/2000/svg";

const WRITE = {
  count: (value) => number(value),
  bytes_per_second: (value) => `${bytes(Math.round(value))}/s`,
  microseconds: (value) => micros(Math.round(value)),
};

let known = null; // The last document.
let asked = 0; // When it was asked for.
let waiting = false;

function shape(name, className) {
  const element = document.createElementNS(SVG, name);
  element.setAttribute("class", className);
  return element;
}

function createPlot() {
  const item = make("li", "plot", make("div", "line", slot("h3", "title"), slot("span", "now", "small meta")));
  const svg = shape("svg", "curve");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.append(shape("path", "area"), shape("path", "stroke"));
  item.append(svg, make("div", "ends small meta", slot("span", "from"), slot("span", "most"), make("span", "", "now")));
  return item;
}

// The time that the plots show, in milliseconds: up to an hour.
function shown(times) {
  return Math.min(HOUR_MS, Math.max(SHORTEST_MS, times[times.length - 1] - times[0]));
}

// The points of each stretch without a gap: a sample that is missing, or late by more than one interval.
function stretches(times, values, interval, span) {
  const end = times[times.length - 1];
  const most = Math.max(...values.filter((value) => value !== null), 0) || 1;
  const found = [];
  let before = null;
  values.forEach((value, index) => {
    const at = times[index];
    if (value !== null && end - at <= span) {
      const x = WIDTH * (1 - (end - at) / span);
      const y = HEIGHT - (value / most) * (HEIGHT - TOP);
      if (before === null || at - before > 2.5 * interval) found.push([]);
      found[found.length - 1].push([x.toFixed(1), y.toFixed(1)]);
      before = at;
    } else {
      before = null;
    }
  });
  return found;
}

function updatePlot(item, series) {
  const { at_unix_ms: times, interval_ms: interval } = known;
  const write = WRITE[series.unit] ?? number;
  const values = series.values.filter((value) => value !== null);
  const last = series.values[series.values.length - 1] ?? null;
  const most = values.length ? Math.max(...values) : null;
  const now = last === null ? "–" : write(last);
  const span = shown(times);
  text(partOf(item, "title"), series.title);
  text(partOf(item, "now"), now);
  text(partOf(item, "from"), span > 59.5 * 60_000 ? "1 h ago" : `${Math.round(span / 60_000)} min ago`);
  text(partOf(item, "most"), most === null ? "" : `at most ${write(most)}`);
  const lines = stretches(times, series.values, interval, span);
  const path = (points) => points.map(([x, y]) => `${x},${y}`).join(" L");
  // A single sample is a point: a line of no length with round ends.
  const stroke = lines.map((points) => `M${path(points)}${points.length === 1 ? ` L${path(points)}` : ""}`);
  const area = lines.map((points) => `M${points[0][0]},${HEIGHT} L${path(points)} L${points[points.length - 1][0]},${HEIGHT} Z`);
  const svg = item.querySelector("svg");
  attribute(svg, "aria-label", `${series.title}: now ${last === null ? "not known" : now}${most === null ? "" : `, at most ${write(most)} in the last hour`}`);
  attribute(svg.querySelector(".area"), "d", area.join(" "));
  attribute(svg.querySelector(".stroke"), "d", stroke.join(" "));
}

async function refresh() {
  waiting = true;
  asked = Date.now();
  try {
    known = await ask("/debug/history");
    sync(byId("history"), known.series, (series) => series.name, createPlot, updatePlot);
    text(byId("history-error"), "");
  } catch (error) {
    text(byId("history-error"), error.message);
  } finally {
    waiting = false;
    byId("history-error").hidden = byId("history-error").textContent === "";
  }
}

// Call it at every render; it asks when a new sample is due.
export function showHistory() {
  if (!waiting && Date.now() - asked >= (known?.interval_ms ?? 2_000)) refresh();
}
