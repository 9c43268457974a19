// The page: takes the agent's state from /debug/events and shows it.
//
// Everything that comes from the agent is set as text and never as markup: image names are written by
// the caller of a pull.

import { attribute, badge, byId, cell, empty, make, moment, partOf, show, slot, sync, text } from "./dom.js";
import { showEndpoints, takeEndpoints } from "./endpoints.js";
import { bytes, duration, micros, number, plural } from "./format.js";
import { showHeartbeats } from "./heartbeats.js";
import { showHistory } from "./history.js";
import { ago, ask, follow, now, since } from "./process.js";
import { image, left, part, state } from "./pulls.js";

const DETAIL_MS = 2_000;
const OLD_ERROR_MS = 15 * 60_000;

const expanded = new Map(); // Actor name -> when its detail was asked for last.
let last = null; // The last document.

function nameOf(pull) {
  const name = make("span", "image");
  const { from, base, version } = image(pull.image);
  name.title = pull.image;
  name.append(make("span", "from", from), make("b", "", base), make("span", "version", version));
  return name;
}

// ---- the head ----

function showVersion(version) {
  if (!version) return;
  text(byId("subject"), version.node_name);
  text(byId("version"), `version ${version.version}`);
  text(byId("uptime"), version.started_unix_ms ? `up ${since(version.started_unix_ms)}` : "");
  text(byId("process"), version.state_folder_id ? `state folder ${version.state_folder_id}` : "");
  const ready = byId("ready");
  text(ready, version.ready ? "ready" : "not ready");
  ready.dataset.tone = version.ready ? "good" : "bad";
  text(byId("ready-note"), version.started_unix_ms ? `started ${moment(version.started_unix_ms)}` : "");
  show(byId("not-ready"), version.ready ? "" : `Not ready: ${version.not_ready_reasons.join("; ") || "no reason given"}.`);
  text(byId("runtime-note"), version.runtime_endpoint);
}

function showFacts(pulls, version) {
  const limit = pulls.limit ?? { max_parallel_image_pulls: 0 };
  const most = limit.max_parallel_image_pulls;
  text(byId("limit"), most ? `${pulls.running} of ${most} in use` : `${pulls.running} running`);
  byId("limit").dataset.tone = most && pulls.running >= most && pulls.queued ? "busy" : "";
  const notes = [most ? `when full: ${limit.when_full}` : "no limit"];
  if (limit.overridden) notes.push(`set at runtime, settings have ${limit.configured || "no limit"}`);
  if (limit.per_registry) notes.push(`${limit.per_registry} per registry`);
  if (limit.enforced_by === "runtime") notes.push("enforced by the runtime");
  if (limit.enforce_note) notes.push(limit.enforce_note);
  text(byId("limit-note"), notes.join(" · "));

  text(byId("queued"), `${number(pulls.queued)} queued`);
  const oldest = pulls.oldest_wait_ms + (now() - last.now_unix_ms);
  text(byId("queued-note"), [
    pulls.queued ? `oldest ${duration(oldest)}` : "no pull is queued",
    plural(pulls.callers, "caller"),
  ].join(" · "));

  const moving = pulls.pulls.map((pull) => pull.progress).filter(Boolean);
  const speed = moving.reduce((sum, progress) => sum + progress.bytes_per_second, 0);
  const toGo = moving.reduce((sum, p) => sum + Math.max(0, p.bytes_total - p.bytes_done), 0);
  text(byId("speed"), `${bytes(speed)}/s`);
  text(byId("speed-note"), toGo ? `${bytes(toGo)} left in running pulls` : "no download");

  const runtime = byId("runtime");
  const name = version?.runtime_name ? `${version.runtime_name} ${version.runtime_version}` : "runtime";
  const health = pulls.runtime_health;
  text(runtime, health === "up" ? name : `${name} ${health}`);
  runtime.dataset.tone = { up: "good", down: "bad" }[health] ?? "busy";
  if (pulls.runtime_error) text(byId("runtime-note"), pulls.runtime_error);
}

// ---- pulls ----

const RUNNING = new Set(["running", "running_present", "waiting_for_runtime", "abandoned"]);

// A number may come again when the agent lost its state.
const pullKey = (pull) => `${pull.id}/${pull.requested_unix_ms}`;

function createRunning(pull) {
  const item = make("li", "pull");
  item.dataset.pullId = pull.id;
  const bar = slot("div", "bar", "bar");
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-label", `Download of ${pull.image}`);
  bar.append(make("div", "fill"));
  item.append(
    make("div", "line", nameOf(pull), slot("span", "badges", "badges")),
    bar,
    make("div", "line small", slot("span", "done"), slot("span", "meta", "meta")),
  );
  return item;
}

function badges(element, pull) {
  const wanted = [];
  if (pull.state !== "running" && RUNNING.has(pull.state)) wanted.push([state(pull.state), "busy"]);
  if (pull.state === "held" || pull.state === "retrying") wanted.push([state(pull.state), "busy"]);
  if (pull.resumed) wanted.push(["resumed", "info"]);
  if (pull.attempts > 1) wanted.push([`attempt ${pull.attempts}`, "busy"]);
  if (pull.with_credentials) wanted.push(["with credentials", ""]);
  sync(element, wanted, ([label]) => label, ([label]) => badge(label), (made, [, tone]) => {
    made.dataset.tone = tone;
  });
}

function updateRunning(item, pull) {
  item.dataset.state = pull.state;
  badges(partOf(item, "badges"), pull);
  const progress = pull.progress;
  const bar = partOf(item, "bar");
  const share = part(progress);
  const stalled = progress && progress.idle_ms >= 5_000 && share !== null && share < 1;
  bar.dataset.kind = share === null ? "unknown" : stalled ? "stalled" : "known";
  bar.firstElementChild.style.transform = `scaleX(${share ?? 1})`;
  const done = [];
  if (share === null) {
    bar.removeAttribute("aria-valuenow");
    if (progress?.bytes_done) done.push(bytes(progress.bytes_done));
  } else {
    attribute(bar, "aria-valuenow", Math.floor(share * 100));
    done.push(`${Math.floor(share * 100)} %`, `${bytes(progress.bytes_done)} of ${bytes(progress.bytes_total)}`);
  }
  if (progress?.layers_total) done.push(`${progress.layers_done}/${progress.layers_total} layers`);
  if (stalled) done.push(`no data for ${duration(progress.idle_ms)}`);
  else if (progress?.bytes_per_second && share !== 1) done.push(`${bytes(progress.bytes_per_second)}/s`);
  const toGo = left(progress);
  if (toGo !== null) done.push(`${duration(toGo)} left`);
  text(partOf(item, "done"), done.join(" · ") || "progress unknown");

  const meta = [];
  if (progress?.phase && progress.phase !== "downloading") meta.push(progress.phase);
  if (pull.pod) meta.push(pull.pod);
  meta.push(plural(pull.callers, "caller"));
  if (pull.started_unix_ms) meta.push(`running ${since(pull.started_unix_ms)}`);
  text(partOf(item, "meta"), meta.join(" · "));
}

function createQueued(pull) {
  const item = make("li", "waiting");
  item.dataset.pullId = pull.id;
  item.append(
    slot("span", "position", "position"),
    make("div", "what", nameOf(pull), make("div", "small meta", slot("span", "meta"), slot("span", "badges", "badges"))),
    slot("span", "wait", "wait"),
  );
  return item;
}

function updateQueued(item, pull) {
  item.dataset.state = pull.state;
  text(partOf(item, "position"), pull.position ? String(pull.position) : "–");
  badges(partOf(item, "badges"), pull);
  const meta = [];
  if (pull.state === "checking") meta.push("checking whether the image is present");
  if (pull.pod) meta.push(pull.pod);
  if (pull.callers !== 1) meta.push(plural(pull.callers, "caller"));
  if (pull.error) meta.push(pull.error);
  text(partOf(item, "meta"), meta.join(" · "));
  text(partOf(item, "wait"), pull.requested_unix_ms ? since(pull.requested_unix_ms) : "");
}

function createFinished(pull) {
  const item = make("li", "waiting");
  item.dataset.pullId = pull.id;
  const label = slot("span", "state", "badge");
  item.append(
    label,
    make("div", "what", nameOf(pull), slot("div", "meta", "small meta"), slot("div", "error", "error")),
    slot("span", "wait", "wait"),
  );
  return item;
}

function updateFinished(item, pull) {
  item.dataset.state = pull.state;
  const label = partOf(item, "state");
  text(label, state(pull.state));
  label.dataset.tone = { succeeded: "good", failed: "bad" }[pull.state] ?? "";
  const meta = [];
  const begun = pull.started_unix_ms || pull.requested_unix_ms;
  if (begun && pull.finished_unix_ms) meta.push(`took ${duration(pull.finished_unix_ms - begun)}`);
  if (pull.progress?.bytes_done) meta.push(bytes(pull.progress.bytes_done));
  if (pull.attempts > 1) meta.push(plural(pull.attempts, "attempt"));
  if (pull.reason) meta.push(pull.reason);
  if (pull.queue_wait_ms >= 1000) meta.push(`waited ${duration(pull.queue_wait_ms)}`);
  if (pull.resumed) meta.push("resumed");
  text(partOf(item, "meta"), meta.join(" · "));
  show(partOf(item, "error"), pull.error);
  const wait = partOf(item, "wait");
  text(wait, ago(pull.finished_unix_ms));
  attribute(wait, "title", moment(pull.finished_unix_ms));
}

function showPulls(pulls) {
  const running = pulls.pulls.filter((pull) => RUNNING.has(pull.state));
  const waiting = pulls.pulls.filter((pull) => !RUNNING.has(pull.state));
  sync(byId("running"), running, pullKey, createRunning, updateRunning);
  sync(byId("queue"), waiting, pullKey, createQueued, updateQueued);
  sync(byId("finished"), pulls.finished, pullKey, createFinished, updateFinished);
  empty("running", running.length);
  empty("queue", waiting.length);
  empty("finished", pulls.finished.length);
  const listed = waiting.filter((pull) => pull.position > 0).length;
  fold("queue", waiting.length, pulls.queued > listed ? `${number(pulls.queued - listed)} more not listed.` : "");
  fold("finished", pulls.finished.length, "");
}

// Long lists show their beginning until one asks for the rest.
const FOLDED = 10;
const unfolded = new Set();

function fold(name, count, note) {
  const open = unfolded.has(name);
  byId(name).classList.toggle("folded", !open);
  const button = document.querySelector(`[data-fold="${name}"]`);
  button.hidden = count <= FOLDED;
  button.setAttribute("aria-expanded", String(open));
  text(button, open ? `Show the first ${FOLDED}` : `Show all ${number(count)}`);
  if (name === "queue") show(byId("queue-more"), note);
}

for (const button of document.querySelectorAll("[data-fold]")) {
  button.addEventListener("click", () => {
    const name = button.dataset.fold;
    if (!unfolded.delete(name)) unfolded.add(name);
    render();
  });
}

// ---- actors ----

const TONES = { running: "good", starting: "busy", restarting: "bad", stopped: "bad", "not answering": "bad", disabled: "" };
let actorNumber = 0;

function createActor(actor) {
  const group = make("tbody");
  group.setAttribute("role", "rowgroup");
  group.dataset.actor = actor.name;
  actorNumber += 1;
  const button = make("button", "toggle", actor.name);
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.setAttribute("aria-controls", `actor-${actorNumber}`);
  const head = make("th", "", button, slot("span", "summary", "small meta"));
  head.scope = "row";
  head.setAttribute("role", "rowheader");
  const status = cell("status-cell");
  status.append(slot("span", "status", "badge"));
  const mailbox = cell("mailbox", "number");
  mailbox.dataset.label = "mailbox";
  const handled = cell("handled", "number");
  handled.dataset.label = "handled";
  const p99 = cell("p99", "number");
  p99.dataset.label = "p99";
  const restarts = cell("restarts", "number");
  restarts.dataset.label = "restarts";
  const row = make("tr", "actor", head, status, mailbox, handled, p99, restarts, cell("error", "error"));
  row.setAttribute("role", "row");
  row.addEventListener("click", (event) => {
    // A click that ends a selection of text is none.
    if (event.target.closest("a") || String(window.getSelection())) return;
    toggle(group, button);
  });
  const detail = make("td", "detail", make("p", "meta", "loading"));
  detail.id = `actor-${actorNumber}`;
  detail.colSpan = 7;
  detail.setAttribute("role", "cell");
  const detailRow = make("tr", "detail-row", detail);
  detailRow.setAttribute("role", "row");
  detailRow.hidden = true;
  group.append(row, detailRow);
  return group;
}

function toggle(group, button) {
  const name = group.dataset.actor;
  const open = !expanded.has(name);
  if (open) expanded.set(name, 0);
  else expanded.delete(name);
  button.setAttribute("aria-expanded", String(open));
  group.querySelector(".detail-row").hidden = !open;
  history.replaceState(null, "", open ? `#actor/${encodeURIComponent(name)}` : location.pathname);
  if (open) loadDetail(name);
}

// `#actor/NAME` opens that actor, so that what one sees can be sent to another.
function openLinked() {
  const linked = location.hash.startsWith("#actor/") && document.querySelector(
    `[data-actor="${CSS.escape(decodeURIComponent(location.hash.slice("#actor/".length)))}"]`,
  );
  if (!linked || expanded.has(linked.dataset.actor)) return;
  toggle(linked, linked.querySelector(".toggle"));
  linked.scrollIntoView({ block: "start" });
}

function updateActor(group, actor) {
  const status = partOf(group, "status");
  text(status, actor.status);
  status.dataset.tone = TONES[actor.status] ?? "busy";
  text(partOf(group, "summary"), actor.summary);
  const mailbox = partOf(group, "mailbox");
  text(mailbox, actor.mailbox_capacity ? `${number(actor.mailbox_depth)} / ${number(actor.mailbox_capacity)}` : "–");
  mailbox.dataset.tone = actor.mailbox_depth > actor.mailbox_capacity / 2 ? "busy" : "";
  text(partOf(group, "handled"), number(actor.messages.reduce((sum, message) => sum + message.handled, 0)));
  const slowest = actor.messages.length ? Math.max(...actor.messages.map((message) => message.p99_us)) : null;
  text(partOf(group, "p99"), slowest === null ? "–" : micros(slowest));
  const restarts = partOf(group, "restarts");
  text(restarts, number(actor.restarts));
  restarts.dataset.tone = actor.restarts > 3 ? "busy" : "";
  const error = partOf(group, "error");
  text(error, actor.last_error && [ago(actor.last_error_unix_ms), actor.last_error].filter(Boolean).join(": "));
  error.dataset.age = now() - actor.last_error_unix_ms > OLD_ERROR_MS ? "old" : "new";
  if (expanded.has(actor.name)) loadDetail(actor.name);
}

async function loadDetail(name) {
  if (Date.now() - expanded.get(name) < DETAIL_MS) return;
  expanded.set(name, Date.now());
  const detail = document.querySelector(`[data-actor="${CSS.escape(name)}"] .detail`);
  try {
    const actor = await ask(`/debug/actors/${encodeURIComponent(name)}`);
    // While text in it is selected it is left as it is.
    const selection = window.getSelection();
    if (String(selection) && detail.contains(selection.anchorNode)) return;
    const scrolled = detail.querySelector("pre")?.scrollTop ?? 0;
    detail.replaceChildren(detailOf(actor));
    detail.querySelector("pre").scrollTop = scrolled;
  } catch (error) {
    if (detail) detail.replaceChildren(make("p", "error", `Cannot read this actor: ${error.message}`));
  }
}

function block(title, ...children) {
  return make("div", "block", make("h3", "", title), ...children);
}

function detailOf(actor) {
  const events = make("ol", "events");
  for (const event of [...actor.events].reverse()) {
    const time = make("time", "", ago(event.unix_ms));
    time.title = moment(event.unix_ms);
    events.append(make("li", "", time, make("span", "", event.text)));
  }
  const stateBlock = make("pre", "", JSON.stringify(actor.state, null, 2));
  stateBlock.tabIndex = 0;
  stateBlock.setAttribute("aria-label", `State of ${actor.name}`);
  return make("div", "blocks",
    block("Messages", actor.messages.length ? messagesOf(actor) : make("p", "meta", "none yet")),
    block("Last events", actor.events.length ? events : make("p", "meta", "none yet")),
    block("State", stateBlock),
  );
}

function messagesOf(actor) {
  const head = make("tr", "");
  for (const title of ["", "handled", "busy", "p50", "p90", "p99", "max"]) {
    const th = make("th", title ? "number" : "", title || "message");
    th.scope = "col";
    head.append(th);
  }
  const rows = actor.messages.map((message) => {
    const name = make("th", "", message.message);
    name.scope = "row";
    const values = [number(message.handled), number(message.rejected_busy)];
    values.push(...[message.p50_us, message.p90_us, message.p99_us, message.max_us].map(micros));
    return make("tr", "", name, ...values.map((value) => make("td", "number", value)));
  });
  return make("div", "scroll", make("table", "messages", make("thead", "", head), make("tbody", "", ...rows)));
}

function showActors(actors) {
  sync(byId("actors"), actors, (actor) => actor.name, createActor, updateActor);
}

// ---- all of it ----

function render() {
  if (!last) return;
  showVersion(last.version);
  show(byId("pulls-error"), last.pulls ? "" : `Cannot read the pulls: ${last.pulls_error}.`);
  if (last.pulls) {
    showFacts(last.pulls, last.version);
    showPulls(last.pulls);
    const { running, queued } = last.pulls;
    document.title = `${running} running, ${number(queued)} queued · ${last.version?.node_name ?? ""} · Keelson`;
  }
  const clock = { now: now(), passed: now() - last.now_unix_ms };
  showHeartbeats(last.heartbeats, last.heartbeats_error, clock);
  showEndpoints(clock);
  showActors(last.actors);
  showHistory();
  if (byId("main").getAttribute("aria-busy") === "true") {
    byId("main").setAttribute("aria-busy", "false");
    openLinked();
  }
}

window.addEventListener("hashchange", openLinked);
follow({ state: (document) => { last = document; }, endpoints: takeEndpoints }, render, ["agent", "Reconnecting."]);
