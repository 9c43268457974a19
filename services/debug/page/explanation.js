// One Service explained. In: a document of /debug/endpoints/NAMESPACE/NAME. Out: elements.

import { badge, make, rawLink, verdict } from "./dom.js";
import { listed, number, plural } from "./format.js";

const SHOWN = 100; // Endpoints of a family; the document has all.
const NAMED = 6; // Endpoints in a line on traffic.

function table(label, titles, rows) {
  const head = make("tr", "", ...titles.map((title) => {
    const made = make("th", "", title);
    made.scope = "col";
    return made;
  }));
  const made = make("table", "explained", make("thead", "", head), make("tbody", "", ...rows));
  made.setAttribute("aria-label", label);
  const scroll = make("div", "scroll", made);
  scroll.tabIndex = 0;
  return scroll;
}

function row(...cells) {
  return make("tr", "", ...cells.map((content) => make("td", "", content)));
}

function facts(explanation) {
  const pairs = [
    ["Served", explanation.served ? "yes" : "no"],
    ["Why", explanation.reason],
    ["Type", explanation.type],
    ["Cluster IPs", explanation.cluster_ips.join(", ")],
    ["External IPs", explanation.external_ips.join(", ")],
    ["Load balancer", explanation.load_balancer_ips.join(", ")],
    ["Source ranges", explanation.source_ranges.join(", ")],
    ["Internal traffic", explanation.internal_traffic_policy],
    ["External traffic", explanation.external_traffic_policy],
    ["Affinity", explanation.affinity],
    ["Health check", explanation.health_check_node_port ? `node port ${explanation.health_check_node_port}` : ""],
    ["Ignored", explanation.ignored.join("; ")],
    ["As of", explanation.rev ? `revision ${number(explanation.rev)}` : ""],
  ];
  const shown = pairs.filter(([, value]) => value);
  return make("dl", "pairs", ...shown.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

function trafficRow(traffic) {
  return row(
    traffic.from,
    traffic.to,
    verdict(traffic.verdict),
    listed(traffic.endpoints, NAMED) || "–",
    traffic.reason,
  );
}

function badges(words) {
  return make("span", "badges", ...words);
}

function conditions(endpoint) {
  const words = [];
  if (endpoint.ready) words.push(badge("ready", "good"));
  else if (endpoint.serving) words.push(badge("serving", "busy"));
  else words.push(badge("not ready", "bad"));
  if (endpoint.terminating) words.push(badge("terminating", "busy"));
  return badges(words);
}

function sets(endpoint) {
  const words = [];
  if (endpoint.cluster_set) words.push(badge("cluster", "info"));
  if (endpoint.local_set) words.push(badge("local", "info"));
  return words.length ? badges(words) : "–";
}

function endpointRow(endpoint) {
  const address = endpoint.address.includes(":") ? `[${endpoint.address}]` : endpoint.address;
  const place = [endpoint.node && (endpoint.local ? `${endpoint.node} (this node)` : endpoint.node), endpoint.zone && `zone ${endpoint.zone}`];
  const made = row(
    `${address}:${endpoint.port}`,
    endpoint.pod || "–",
    place.filter(Boolean).join(", ") || "–",
    conditions(endpoint),
    sets(endpoint),
    endpoint.reason,
  );
  made.dataset.chosen = String(endpoint.cluster_set || endpoint.local_set);
  return made;
}

function familyOf(family, title) {
  const all = family.endpoints;
  const head = make("h4", "", `${family.family}, topology: ${family.topology}`);
  const parts = [head];
  if (family.topology_reason) parts.push(make("p", "small meta", family.topology_reason));
  if (family.traffic.length) {
    parts.push(table(`Traffic to ${title}, ${family.family}`, ["From", "To", "Verdict", "Endpoints", "Why"], family.traffic.map(trafficRow)));
  }
  if (all.length) {
    const rows = all.slice(0, SHOWN).map(endpointRow);
    parts.push(table(`Endpoints of ${title}, ${family.family}`, ["Endpoint", "Pod", "Node", "Conditions", "Sets", "Why"], rows));
  } else parts.push(make("p", "small meta", "No endpoints."));
  if (all.length > SHOWN) parts.push(make("p", "small meta", `${number(all.length - SHOWN)} more in the JSON document.`));
  return make("div", "family", ...parts);
}

function portTitle(port) {
  const number = `${port.port}/${port.protocol}`;
  const name = port.name ? `${port.name} ${number}` : number;
  return port.node_port ? `${name}, node port ${port.node_port}` : name;
}

export function explanationOf(explanation) {
  const parts = [facts(explanation)];
  for (const port of explanation.ports) {
    const title = portTitle(port);
    parts.push(make("h3", "", `Port ${title}`), ...port.families.map((family) => familyOf(family, title)));
  }
  if (explanation.slices.length) {
    const rows = explanation.slices.map((slice) =>
      row(slice.name, slice.address_type, plural(slice.endpoints, "endpoint"), badge(slice.used ? "used" : "not used", slice.used ? "good" : "busy"), slice.reason));
    parts.push(make("h3", "", "EndpointSlices"), table("EndpointSlices", ["Slice", "Addresses", "Endpoints", "Used", "Why"], rows));
  }
  const address = [explanation.namespace, explanation.name].map(encodeURIComponent).join("/");
  parts.push(make("p", "", rawLink(`/debug/endpoints/${address}`)));
  return make("div", "explanation", ...parts);
}
