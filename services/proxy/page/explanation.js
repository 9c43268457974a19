// Where packets go. In: a document of /debug/explain. Out: elements.

import { badge, make, rawLink, verdict } from "./dom.js";
import { listed } from "./format.js";

const NAMED = 12; // Endpoints that are shown; the document has all.

function wayOf(way) {
  const badges = make("span", "badges", verdict(way.verdict));
  if (way.masqueraded) badges.append(badge("masqueraded", "busy"));
  const parts = [make("div", "line", make("h3", "", `From ${way.from}`, badges))];
  if (way.endpoints.length) parts.push(make("p", "targets", listed(way.endpoints, NAMED)));
  parts.push(make("ol", "", ...way.steps.map((step) => make("li", "", step))));
  return make("div", "way", ...parts);
}

export function explanationOf(explanation, address) {
  return [make("p", "", `${explanation.frontend}. `, rawLink(address)), ...explanation.ways.map(wayOf)];
}
