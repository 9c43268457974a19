// The section on service endpoints. In: the events `endpoints`, the clock, and /debug/endpoints. Out: the section's
// elements. Only the lines that are shown are requested, and only while the page is visible.

import { attribute, byId, cell, empty, fact, make, moment, partOf, show, slot, sync, text } from "./dom.js";
import { explanationOf } from "./explanation.js";
import { bytes, duration, number, plural, statusWord } from "./format.js";
import { ask } from "./process.js";

const SHOWN = 200;
const FOLDED = 10; // Lines shown before "show all" or a search.
const LIST_MS = 2_000; // Between two lists while Services change.
const SEARCH_MS = 5_000; // The same while a filter is set: the agent then looks at every Service.
const TYPING_MS = 250;
const DETAIL_MS = 2_000;
const TONES = { synced: "good", stale: "bad", pending: "busy", "not-watched": "" };
const SOURCE_TONES = { healthy: "good", failing: "bad", pending: "busy" };

const expanded = new Map(); // `namespace/name` -> the revision that is shown and when it was asked for.
let last = null; // The last event.
let list = { list: [], matching: 0, services: 0 };
let listed = null; // The question that `list` answers.
let asked = { at: 0, filter: null };
let asking = false;
let unfolded = false;
let serviceNumber = 0;

const filter = () => byId("services-filter").value.trim();
const revision = () => `${last.endpoints.instance_id}/${last.endpoints.rev}`;
const nameOf = (service) => `${service.namespace}/${service.name}`;

// ---- status ----

const forAges = (since, clock) => (since ? ` for ${duration(clock.now - since)}` : "");

function showFacts(state, clock) {
  const calm = state.state === "synced" || state.state === "not-watched";
  fact("endpoints-state", calm ? statusWord(state.state) : `${statusWord(state.state)}${forAges(state.since_unix_ms, clock)}`, TONES[state.state],
    state.reason,
    state.since_unix_ms ? `since ${moment(state.since_unix_ms)}` : "",
  );
  fact("endpoints-source", state.source, "", state.source_place);
  fact("endpoints-services", plural(state.services, "Service"), "", plural(state.endpoints, "endpoint"),
    `${plural(state.events, "event")}, published as ${plural(state.revisions, "revision")}`);
  fact("endpoints-rev", state.rev ? `revision ${number(state.rev)}` : "none yet", state.rev && !state.durable ? "bad" : "",
    state.rev && !state.durable ? "not on disk" : "",
    state.published_unix_ms ? `${duration(clock.now - state.published_unix_ms)} ago` : "",
    state.instance_id && state.instance_id !== "0" ? `instance ${state.instance_id}` : "",
    ...state.listen,
  );
  const node = state.node;
  if (!node) fact("endpoints-node", "unknown", "");
  else {
    // A folder of manifests need not hold the Node.
    fact("endpoints-node", node.name, node.exists || state.source === "files" ? "" : "busy",
      node.exists ? "" : "Node not found", node.zone ? `zone ${node.zone}` : "no zone", node.ips.join(", "), node.pod_cidrs.length ? `pods ${node.pod_cidrs.join(", ")}` : "",
      node.service_cidrs.length ? `Services ${node.service_cidrs.join(", ")}` : "",
      node.exists && !node.eligible ? "excluded from load balancers" : "");
  }
}

function createSource(source) {
  return make("li", "", make("b", "", source.resource), slot("span", "health", "badge"), slot("span", "note", "small meta"));
}

function updateSource(item, source, clock) {
  const health = partOf(item, "health");
  text(health, statusWord(source.health));
  health.dataset.tone = SOURCE_TONES[source.health] ?? "";
  const failing = source.health !== "healthy" && source.since_unix_ms ? `for ${duration(clock.now - source.since_unix_ms)}` : "";
  const notes = [plural(source.objects, "object"), source.synced ? "" : "not listed yet", failing, source.reason];
  text(partOf(item, "note"), notes.filter(Boolean).join(" · "));
}

const faultKey = (fault) => `${fault.file}:${fault.line}:${fault.reason}`;

function updateFault(item, fault) {
  const place = fault.line ? `${fault.file}:${fault.line}` : fault.file;
  const instead = fault.earlier_in_use ? "; the last valid version stays in use" : "";
  text(item, `${place}: ${fault.reason}${instead}`);
}

// Red: the rules do not match the Services, or their status is not known.
function toneOf(backend) {
  if (backend.silent || backend.state === "failing") return "bad";
  return backend.state === "synced" ? "good" : "busy";
}

function createBackend(backend) {
  const name = make("th", "", make("span", "", backend.name), slot("span", "who", "small meta"));
  name.scope = "row";
  name.setAttribute("role", "rowheader");
  const state = cell("state");
  state.append(slot("span", "health", "badge"), slot("span", "why", "small"));
  const page = slot("a", "page");
  page.rel = "noreferrer";
  const places = cell("places");
  places.append(page, slot("span", "debug", "small meta"));
  const row = make("tr", "condition", name, state, cell("rev", "number"), cell("sync", "number meta"), places);
  row.setAttribute("role", "row");
  row.dataset.backend = backend.name;
  return row;
}

function updateBackend(row, backend, state, clock) {
  const tone = toneOf(backend);
  row.dataset.tone = tone === "bad" ? tone : "";
  const version = backend.version ? ` · ${backend.version}` : "";
  const ports = backend.service_ports ? ` · ${plural(backend.service_ports, "service port")}` : "";
  text(partOf(row, "who"), `pid ${backend.pid}${version}${ports}`);
  const health = partOf(row, "health");
  text(health, backend.silent ? `no report${forAges(backend.seen_unix_ms, clock)}` : backend.state);
  health.dataset.tone = tone;
  const why = partOf(row, "why");
  text(why, [backend.silent ? `last state ${backend.state}` : "", backend.reason].filter(Boolean).join(" · "));
  why.classList.toggle("error", tone === "bad");
  const rev = partOf(row, "rev");
  const none = backend.rev === 0 && backend.instance_id === "0";
  text(rev, none ? "none yet" : backend.behind ? `${number(backend.behind)} behind` : `at ${number(backend.rev)}`);
  rev.dataset.tone = backend.behind ? "busy" : "";
  attribute(rev, "title", `revision ${backend.rev} is in effect, the newest is ${state.rev}`);
  const synced = partOf(row, "sync");
  text(synced, backend.last_sync_unix_ms ? `${duration(clock.now - backend.last_sync_unix_ms)} ago` : "never");
  if (backend.last_sync_unix_ms) attribute(synced, "title", moment(backend.last_sync_unix_ms));
  const page = partOf(row, "page");
  // Nothing but an address of the web becomes a link.
  const linked = /^https?:\/\//.test(backend.http);
  page.hidden = !linked;
  if (linked) attribute(page, "href", backend.http);
  else page.removeAttribute("href");
  text(page, linked ? backend.http : "");
  text(partOf(row, "debug"), backend.debug);
}

function showBackends(state, clock) {
  const backends = state.backends;
  byId("backends-part").hidden = !backends.length;
  const ill = backends.filter((backend) => toneOf(backend) === "bad").length;
  text(byId("backends-title"), `${plural(backends.length, "backend")}${ill ? `, ${number(ill)} failing or not reporting` : ""}`);
  byId("backends-title").classList.toggle("error", ill > 0);
  sync(byId("backends"), backends, (backend) => `${backend.name}/${backend.pid}`, createBackend,
    (row, backend) => updateBackend(row, backend, state, clock));
}

function createWatcher(watcher) {
  const peer = make("th", "", make("span", "", watcher.peer || "unknown"), slot("span", "listener", "small meta"));
  peer.scope = "row";
  peer.setAttribute("role", "rowheader");
  const row = make("tr", "condition", peer, cell("api"), cell("for", "number meta"), cell("behind", "number"), cell("sent", "number"));
  row.setAttribute("role", "row");
  return row;
}

function updateWatcher(row, watcher, clock) {
  text(partOf(row, "listener"), watcher.listener);
  text(partOf(row, "api"), watcher.api);
  const since = partOf(row, "for");
  text(since, watcher.since_unix_ms ? duration(clock.now - watcher.since_unix_ms) : "");
  if (watcher.since_unix_ms) attribute(since, "title", `since ${moment(watcher.since_unix_ms)}`);
  const behind = partOf(row, "behind");
  text(behind, watcher.behind ? `${number(watcher.behind)} behind` : `at ${number(watcher.rev)}`);
  behind.dataset.tone = watcher.behind ? "busy" : "";
  text(partOf(row, "sent"), `${plural(watcher.items, "item")}, ${bytes(watcher.bytes)}`);
}

function showWatchers(watchers, all, clock) {
  const behind = watchers.filter((watcher) => watcher.behind).length;
  text(byId("watchers-title"), `${plural(all, "client", "clients")}${behind ? `, ${number(behind)} behind` : ""}`);
  sync(byId("watchers"), watchers, (watcher) => watcher.id, createWatcher, (row, watcher) => updateWatcher(row, watcher, clock));
  show(byId("watchers-more"), all > watchers.length ? `${number(all - watchers.length)} more not listed.` : "");
  byId("watchers-table").hidden = !watchers.length;
}

// ---- Services ----

function createService(service) {
  const name = nameOf(service);
  const group = make("tbody");
  group.setAttribute("role", "rowgroup");
  group.dataset.service = name;
  serviceNumber += 1;
  const button = make("button", "toggle", service.name);
  button.type = "button";
  button.setAttribute("aria-expanded", String(expanded.has(name)));
  button.setAttribute("aria-controls", `service-${serviceNumber}`);
  const head = make("th", "", button, make("span", "summary small meta", service.namespace));
  head.scope = "row";
  head.setAttribute("role", "rowheader");
  const labelled = (part, label = part) => {
    const made = cell(part, "number");
    made.dataset.label = label;
    return made;
  };
  const row = make("tr", "actor service", head, cell("type"), cell("ports", "ports"), labelled("ready"), labelled("local"), labelled("chosen", "selected"));
  row.setAttribute("role", "row");
  row.addEventListener("click", (event) => {
    // A click that ends a selection of text is none.
    if (event.target.closest("a") || String(window.getSelection())) return;
    toggle(group);
  });
  const detail = make("td", "detail", make("p", "meta", "loading"));
  detail.id = `service-${serviceNumber}`;
  detail.colSpan = 6;
  detail.setAttribute("role", "cell");
  const detailRow = make("tr", "detail-row", detail);
  detailRow.setAttribute("role", "row");
  detailRow.hidden = !expanded.has(name);
  group.append(row, detailRow);
  return group;
}

function updateService(group, service) {
  const type = partOf(group, "type");
  text(type, [service.type, ...service.cluster_ips].filter(Boolean).join(" · "));
  text(partOf(group, "ports"), service.ports.join(", ") || "–");
  text(partOf(group, "ready"), number(service.ready));
  text(partOf(group, "local"), number(service.local_ready));
  const chosen = partOf(group, "chosen");
  text(chosen, number(service.selected));
  chosen.dataset.tone = service.selected ? "" : "busy";
  attribute(chosen, "title", `as of revision ${service.rev}`);
}

function toggle(group) {
  const name = group.dataset.service;
  const open = !expanded.has(name);
  if (open) expanded.set(name, { rev: "", asked: 0 });
  else expanded.delete(name);
  group.querySelector(".toggle").setAttribute("aria-expanded", String(open));
  group.querySelector(".detail-row").hidden = !open;
  history.replaceState(null, "", open ? `#service/${name}` : location.pathname);
  if (open) loadDetail(group);
}

async function loadDetail(group) {
  const name = group.dataset.service;
  const shown = expanded.get(name);
  const rev = revision();
  if (!shown || shown.rev === rev || Date.now() - shown.asked < DETAIL_MS) return;
  shown.asked = Date.now();
  const detail = group.querySelector(".detail");
  try {
    const explanation = await ask(`/debug/endpoints/${name.split("/").map(encodeURIComponent).join("/")}`);
    shown.rev = rev;
    // While text in it is selected it is left as it is.
    const selection = window.getSelection();
    if (String(selection) && detail.contains(selection.anchorNode)) return;
    detail.replaceChildren(explanationOf(explanation));
  } catch (error) {
    detail.replaceChildren(make("p", "error", `Cannot explain this Service: ${error.message}`));
  }
}

async function loadList() {
  const wanted = { rev: revision(), filter: filter() };
  const answered = listed?.rev === wanted.rev && listed.filter === wanted.filter;
  const soon = asked.filter === wanted.filter && Date.now() - asked.at < (wanted.filter ? SEARCH_MS : LIST_MS);
  if (asking || answered || soon) return;
  asking = true;
  asked = { at: Date.now(), filter: wanted.filter };
  try {
    list = await ask(`/debug/endpoints?${new URLSearchParams({ max: SHOWN, filter: wanted.filter })}`);
    listed = wanted;
    show(byId("services-error"), "");
  } catch (error) {
    show(byId("services-error"), `Cannot list the Services: ${error.message}.`);
  } finally {
    asking = false;
  }
  showServices();
  if (filter() !== wanted.filter) loadList();
}

function showServices() {
  const services = list.list;
  sync(byId("services"), services, nameOf, createService, updateService);
  byId("services").hidden = !services.length;
  const all = plural(list.services, "Service");
  const found = listed?.filter ? `${number(list.matching)} of ${all} found` : all;
  const part = list.matching > services.length ? `, first ${number(services.length)} shown` : "";
  text(byId("services-count"), listed ? found + part : "");
  empty("services", services.length || !listed ? 1 : 0);
  const open = unfolded || Boolean(filter());
  byId("services").classList.toggle("folded", !open);
  const button = byId("services-fold");
  button.hidden = services.length <= FOLDED || Boolean(filter());
  button.setAttribute("aria-expanded", String(open));
  text(button, open ? `Show the first ${FOLDED}` : `Show ${number(services.length)}`);
  for (const group of byId("services").querySelectorAll("[data-service]")) {
    if (expanded.has(group.dataset.service)) loadDetail(group);
  }
}

// `#service/NAMESPACE/NAME` shows and opens that Service, wherever in the list it is.
function openLinked() {
  const linked = /^#service\/([^/]+\/[^/]+)$/.exec(location.hash);
  if (!linked || expanded.has(linked[1])) return;
  expanded.set(linked[1], { rev: "", asked: 0 });
  byId("services-filter").value = linked[1];
  if (last?.endpoints) loadList();
  byId("endpoints-section").scrollIntoView({ block: "start" });
}

// ---- what the page calls ----

export function takeEndpoints(event) {
  last = event;
}

// `clock.now` is the agent's time; milliseconds.
export function showEndpoints(clock) {
  if (!last) return;
  const state = last.endpoints;
  const on = Boolean(state) && state.state !== "disabled";
  show(byId("endpoints-error"), state ? "" : `Cannot read the service endpoints: ${last.endpoints_error}.`);
  byId("endpoints-off").hidden = !state || on;
  text(byId("endpoints-off-reason"), state && !on ? `Disabled${state.reason ? `: ${state.reason}` : ""}.` : "");
  byId("endpoints").hidden = !on;
  if (!on) return;
  showFacts(state, clock);
  sync(byId("sources"), state.sources, (source) => source.resource, createSource, (item, source) => updateSource(item, source, clock));
  sync(byId("faults"), state.faults, faultKey, () => make("li"), updateFault);
  byId("faults-part").hidden = !state.faults.length;
  text(byId("faults-title"), plural(last.faults, "invalid manifest", "invalid manifests"));
  showBackends(state, clock);
  showWatchers(state.watchers, last.watchers, clock);
  if (document.hidden) return;
  loadList();
  showServices();
}

byId("services-fold").addEventListener("click", () => {
  unfolded = !unfolded;
  showServices();
});

let typing = 0;
byId("services-filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    if (last?.endpoints) loadList();
  }, TYPING_MS);
});
window.addEventListener("hashchange", openLinked);
openLinked();
