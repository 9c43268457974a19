// The page. In: the events of /debug/events, and /debug/explain at the user's request. Out: what is shown. Nothing is kept.

import { attribute, byId, empty, fact, make, moment, partOf, show, slot, sync, text } from "./dom.js";
import { explanationOf } from "./explanation.js";
import { micros, number, plural } from "./format.js";
import { showHistory } from "./history.js";
import { ago, ask, follow, now, since } from "./process.js";

const LATE_MS = 5_000; // Changes that wait longer than this are worth a word.
const SEPARATE = " · ";

let last = null; // The last event.

// ---- what is wrong ----

const LINK_WORDS = { following: "connected", connecting: "pending" };
const linkWord = (link) => LINK_WORDS[link] ?? (link || "unknown");
const because = (reason) => (reason ? `: ${reason}` : "");

function wrongWith(state) {
  const wrong = [];
  if (state.link !== "following") {
    wrong.push(`The connection to the agent at ${state.target} is ${linkWord(state.link)}${because(state.link_reason)}.`);
  }
  if (state.stale) wrong.push(`The agent's service endpoints are stale${because(state.stale_reason)}.`);
  for (const family of state.families) {
    if (family.state === "disabled") continue;
    if (family.state !== "synced") wrong.push(`${family.family} is ${family.state}${because(family.reason)}.`);
    else if (family.pending_since_unix_ms && now() - family.pending_since_unix_ms > LATE_MS) {
      wrong.push(`${family.family}: changes pending for ${since(family.pending_since_unix_ms)}.`);
    }
  }
  for (const check of state.health_checks) {
    const name = `${check.namespace}/${check.name}`;
    if (check.reason) wrong.push(`The health check node port of ${name} is not listening on port ${check.port}: ${check.reason}.`);
  }
  if (!state.healthy) wrong.push("/healthz and /livez of the proxy fail.");
  return wrong;
}

// ---- facts ----

function sum(families, field) {
  return families.reduce((all, family) => all + family[field], 0);
}

function showFacts(state) {
  const linked = { following: "good", connecting: "busy", failing: "bad" };
  fact("link", linkWord(state.link), linked[state.link], state.link_reason, state.target);
  const freshness = state.stale ? ["stale", state.stale_reason] : [];
  const instance = state.instance_id && `instance ${state.instance_id}`;
  fact("rev", state.rev ? number(state.rev) : "none yet", state.stale ? "busy" : "", ...freshness, instance);
  // A Service may be in both families, so the larger number is the number of Services.
  const services = Math.max(0, ...state.families.map((family) => family.services));
  const ports = plural(sum(state.families, "service_ports"), "service port");
  fact("services", number(services), "", ports, plural(sum(state.families, "endpoints"), "endpoint"));
  const later = (best, family) => (family.last_sync_unix_ms > (best?.last_sync_unix_ms ?? 0) ? family : best);
  const newest = state.families.reduce(later, null);
  const pending = state.families.map((family) => family.pending_since_unix_ms).filter(Boolean);
  fact(
    "sync",
    newest ? ago(newest.last_sync_unix_ms) : "none yet",
    "",
    newest && `${newest.family}, took ${micros(newest.last_sync_us)}`,
    pending.length > 0 && `changes pending for ${since(Math.min(...pending))}`,
  );
  const eligible = state.node_eligible ? "node eligible for load balancers" : "node excluded from load balancers";
  fact("health", state.healthy ? "healthy" : "failing", state.healthy ? "good" : "bad", eligible);
}

// ---- families ----

function createFamily(family) {
  const item = make("li", "family");
  const title = make("summary", "", slot("span", "elements-title"));
  const details = make("details", "", title, slot("ul", "elements", "elements"));
  item.append(
    make("h3", "", family.family),
    make("span", "badges", slot("span", "state", "badge")),
    slot("p", "reason", "error"),
    slot("dl", "pairs", "pairs"),
    slot("ul", "notes", "notes"),
    details,
  );
  return item;
}

function pairsOf(family) {
  const programmed = [
    plural(family.services, "Service"),
    plural(family.service_ports, "service port"),
    plural(family.endpoints, "endpoint"),
    plural(family.chains, "chain"),
  ];
  const lastOne = [
    ago(family.last_sync_unix_ms),
    `took ${micros(family.last_sync_us)}`,
    `${number(family.last_added)} added`,
    `${number(family.last_deleted)} deleted`,
  ];
  const syncs = [
    number(family.syncs),
    `${number(family.full_syncs)} full`,
    plural(family.failures, "failure"),
    `repaired ${plural(family.repaired, "time")}`,
  ];
  const affinity = Object.entries(family.affinity_clients)
    .sort()
    .map(([map, clients]) => `${map}: ${number(clients)} of ${number(family.affinity_clients_max)}`);
  return [
    ["Programmed", programmed.join(SEPARATE)],
    ["Last sync", family.last_sync_unix_ms ? lastOne.join(SEPARATE) : "none yet"],
    ["Syncs", syncs.join(SEPARATE)],
    ["Affinity clients", affinity.join(SEPARATE)],
    ["Pending", family.pending_since_unix_ms ? `changes, for ${since(family.pending_since_unix_ms)}` : ""],
  ].filter(([, value]) => value);
}

function updateFamily(item, family) {
  const badge = partOf(item, "state");
  text(badge, family.state);
  badge.dataset.tone = { synced: "good", failing: "bad" }[family.state] ?? "busy";
  show(partOf(item, "reason"), family.reason);
  const pairs = pairsOf(family).flatMap(([name, value]) => [
    { key: name, tag: "dt", value: name },
    { key: `${name} value`, tag: "dd", value },
  ]);
  sync(partOf(item, "pairs"), pairs, (pair) => pair.key, (pair) => make(pair.tag), (element, pair) => text(element, pair.value));
  const unchecked = family.not_checked ? [`not checked for changes by other programs: ${family.not_checked}`] : [];
  const notes = [...unchecked, ...family.other_proxies, ...family.conflicts];
  sync(partOf(item, "notes"), notes, (note) => note, () => make("li"), text);
  partOf(item, "notes").hidden = !notes.length;
  const elements = Object.entries(family.elements);
  const all = elements.reduce((count, [, more]) => count + more, 0);
  text(partOf(item, "elements-title"), `${plural(all, "element")} in ${plural(elements.length, "set")} and maps`);
  const create = ([name]) => make("li", "", make("span", "", name), slot("span", "count", "number"));
  const update = (line, [, count]) => text(partOf(line, "count"), number(count));
  sync(partOf(item, "elements"), elements, ([name]) => name, create, update);
}

// ---- health checks and events ----

function createCheck() {
  const item = make("li", "waiting");
  const lines = [slot("div", "meta", "small meta"), slot("div", "error", "error")];
  const what = make("div", "what", slot("span", "name", "image"), ...lines);
  item.append(slot("span", "port", "position"), what, slot("span", "count", "badge"));
  return item;
}

function updateCheck(item, check) {
  text(partOf(item, "port"), String(check.port));
  text(partOf(item, "name"), `${check.namespace}/${check.name}`);
  text(partOf(item, "meta"), check.listening.length ? `listening on ${check.listening.join(", ")}` : "not listening");
  show(partOf(item, "error"), check.reason);
  const count = partOf(item, "count");
  text(count, plural(check.local_endpoints, "local endpoint"));
  count.dataset.tone = check.local_endpoints ? "good" : "busy";
}

function createEvent() {
  const item = make("li");
  item.append(slot("time", "at"), slot("span", "text"));
  return item;
}

function updateEvent(item, event) {
  const at = partOf(item, "at");
  text(at, ago(event.at_unix_ms));
  attribute(at, "datetime", new Date(event.at_unix_ms).toISOString());
  attribute(at, "title", moment(event.at_unix_ms));
  text(partOf(item, "text"), event.text);
}

// Two events may be alike: they are told apart by how many of the same come before.
function keyed(events) {
  const seen = new Map();
  return events.map((event) => {
    const name = `${event.at_unix_ms} ${event.text}`;
    const count = seen.get(name) ?? 0;
    seen.set(name, count + 1);
    return { ...event, key: `${name} ${count}` };
  });
}

// ---- all of it ----

function render() {
  if (!last) return;
  const state = last.state;
  const wrong = state ? wrongWith(state) : [`Cannot read the proxy state: ${last.state_error}.`];
  const numbered = wrong.map((sentence, index) => ({ sentence, index }));
  sync(byId("wrong"), numbered, (one) => one.index, () => make("li"), (line, one) => text(line, one.sentence));
  byId("wrong").hidden = !wrong.length;
  attribute(byId("main"), "aria-busy", String(!state));
  if (!state) return;
  text(byId("subject"), state.backend);
  text(byId("version"), `version ${state.version}`);
  text(byId("uptime"), state.started_unix_ms ? `up ${since(state.started_unix_ms)}` : "");
  text(byId("process"), state.pid ? `pid ${state.pid}` : "");
  document.title = wrong.length ? `(${wrong.length}) Keelson proxy` : "Keelson proxy";
  showFacts(state);
  showHistory();
  sync(byId("families"), state.families, (family) => family.family, createFamily, updateFamily);
  empty("families", state.families.length);
  const keyOf = (check) => `${check.namespace}/${check.name} ${check.port}`;
  sync(byId("checks"), state.health_checks, keyOf, createCheck, updateCheck);
  empty("checks", state.health_checks.length);
  sync(byId("events"), keyed(state.events), (event) => event.key, createEvent, updateEvent);
  byId("events").hidden = !state.events.length;
  empty("events", state.events.length);
  sync(byId("settings"), state.settings, (setting) => setting, () => make("li"), text);
}

// ---- where packets go ----

let asked = 0;

async function explain() {
  const to = byId("explain-to").value.trim();
  if (!to) return;
  asked += 1;
  const mine = asked;
  const address = `/debug/explain?${new URLSearchParams({ to, from: byId("explain-from").value.trim() })}`;
  text(byId("explain-status"), "asking");
  history.replaceState(null, "", `#explain/${encodeURIComponent(to)}`);
  try {
    const explanation = await ask(address);
    if (mine !== asked) return;
    byId("explanation").replaceChildren(...explanationOf(explanation, address));
    byId("explanation").hidden = false;
    show(byId("explain-error"), "");
    const rev = last?.state?.rev;
    text(byId("explain-status"), rev ? `as of revision ${number(rev)}` : "");
  } catch (error) {
    if (mine !== asked) return;
    byId("explanation").hidden = true;
    show(byId("explain-error"), error.message);
    text(byId("explain-status"), "");
  }
}

// `#explain/ADDRESS:PORT/PROTOCOL` asks at once.
function openLinked() {
  const linked = /^#explain\/(.+)$/.exec(location.hash);
  if (!linked) return;
  try {
    byId("explain-to").value = decodeURIComponent(linked[1]);
  } catch {
    return; // Not written by this page.
  }
  explain();
}

byId("explain-button").addEventListener("click", explain);
for (const name of ["explain-to", "explain-from"]) {
  byId(name).addEventListener("keydown", (event) => {
    if (event.key === "Enter") explain();
  });
}

window.addEventListener("hashchange", openLinked);
openLinked();
follow({ state: (document) => { last = document; } }, render, ["proxy", "The rules in the kernel stay in effect."]);
