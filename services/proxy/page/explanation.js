// Where packets go. In: a document of /debug/explain. Out: elements.

import { make } from "./dom.js";
import { number } from "./format.js";

const NAMED = 12; // Endpoints that are shown; the document has all.
const VERDICTS = { forwarded: "good", dropped: "bad", rejected: "bad", untouched: "info" };

function badge(label, tone = "") {
  const made = make("span", "badge", label);
  made.dataset.tone = tone;
  return made;
}

function wayOf(way) {
  const badges = make("span", "badges", badge(way.verdict, VERDICTS[way.verdict]));
  if (way.masqueraded) badges.append(badge("masqueraded", "busy"));
  const parts = [make("div", "line", make("h3", "", `From ${way.from}`, badges))];
  if (way.endpoints.length) {
    const more = way.endpoints.length - NAMED;
    const named = way.endpoints.slice(0, NAMED).join(", ");
    parts.push(make("p", "targets", more > 0 ? `${named} and ${number(more)} more` : named));
  }
  parts.push(make("ol", "", ...way.steps.map((step) => make("li", "", step))));
  return make("div", "way", ...parts);
}

export function explanationOf(explanation, address) {
  const raw = make("a", "small", "as JSON");
  raw.href = address;
  return [make("p", "", `${explanation.frontend}. `, raw), ...explanation.ways.map(wayOf)];
}
