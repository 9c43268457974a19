// The section on heartbeats. In: the heartbeats of /debug/events, and the clock. Out: the section's elements.

import { attribute, byId, cell, empty, fact, make, moment, partOf, show, slot, sync, text } from "./dom.js";
import { duration, plural, statusWord } from "./format.js";

const BEAT_TONES = { healthy: "good", failing: "bad", pending: "busy" };
// The healthy status of a condition. For other types it is not known.
const GOOD = {
  Ready: "True",
  ImagePullsStalled: "False",
  ServiceEndpointsStale: "False",
  KeelsonStateNotDurable: "False",
  KeelsonNodeContested: "False",
  MemoryPressure: "False",
  DiskPressure: "False",
  PIDPressure: "False",
  NetworkUnavailable: "False",
};

function conditionTone({ type, status }) {
  const good = Object.hasOwn(GOOD, type) ? GOOD[type] : "";
  if (!good) return "";
  return status === good ? "good" : status === "Unknown" ? "busy" : "bad";
}

// Why something fails and since when; "" if it does not.
function failure({ reason, failing_since_unix_ms: from }, clock) {
  return [from ? `failing for ${duration(clock.now - from)}` : "", reason].filter(Boolean).join(": ");
}

function showLease(lease, clock) {
  if (lease.state === "disabled") {
    fact("lease", "disabled", "", lease.reason);
    return;
  }
  const lasts = lease.duration_seconds * 1_000;
  const age = lease.age_ms + clock.passed;
  const expired = lasts > 0 && age > lasts;
  const value = !lease.renewed_unix_ms ? "not renewed yet" : expired ? `expired, renewed ${duration(age)} ago` : `renewed ${duration(age)} ago`;
  fact("lease", value, expired && lease.renewed_unix_ms ? "bad" : BEAT_TONES[lease.state],
    failure(lease, clock),
    lease.name,
    lasts ? `lasts ${duration(lasts)}` : "",
    lease.holder && lease.holder !== lease.name ? `held by ${lease.holder}` : "",
    { contested: "contested: another process renews it", "standing back": "standing back: another process renews it" }[lease.contention] ?? "",
    plural(lease.renewals, "renewal"),
    lease.transitions ? plural(lease.transitions, "transition") : "",
  );
}

function showStatus(status, clock) {
  const next = status.next_report_in_ms - clock.passed;
  fact("status", status.reported_unix_ms ? `reported ${duration(status.age_ms + clock.passed)} ago` : "not reported yet", BEAT_TONES[status.state],
    failure(status, clock),
    status.on_change_only ? "next report on a change" : next > 0 ? `next report in ${duration(next)} or on a change` : "next report due now",
    `${plural(status.reports, "report")} of ${plural(status.computations, "computation")}`,
  );
}

const CREDENTIAL_TONES = { expiring: "bad", expired: "bad" };

// Who the agent is to the API server, and until when.
function showCredentials(credentials, warnings, clock) {
  const [first] = credentials;
  if (!first) return fact("identity", "none", "");
  const left = first.expires_unix_ms - clock.now;
  const value = !first.expires_unix_ms ? "no expiry date" : left > 0 ? `expires in ${duration(left)}` : `expired ${duration(-left)} ago`;
  fact("identity", value, warnings.length ? "bad" : CREDENTIAL_TONES[first.state],
    first.user,
    `${first.kind.replace("_", " ")} ${first.file || "in the kubeconfig"}`,
    first.bound_node ? `bound to node ${first.bound_node}` : "",
    ...warnings,
  );
}

function createCondition(condition) {
  const type = make("th", "", make("span", "", condition.type), slot("span", "source", "small meta"));
  type.scope = "row";
  type.setAttribute("role", "rowheader");
  const status = cell("status-cell");
  status.append(slot("span", "status", "badge"));
  const why = cell("why");
  why.append(slot("span", "reason"), slot("span", "message", "small meta"));
  const row = make("tr", "condition", type, status, cell("for", "number meta"), why);
  row.setAttribute("role", "row");
  return row;
}

function updateCondition(row, condition, clock) {
  const status = partOf(row, "status");
  text(status, condition.status);
  const tone = conditionTone(condition);
  status.dataset.tone = tone;
  // A colour alone does not reach everybody.
  const notes = [tone === "bad" ? "problem" : "", condition.source === "reporter" ? "set by a reporter" : "",
    condition.contested ? "contested: another process writes it" : ""];
  text(partOf(row, "source"), notes.filter(Boolean).join(" · "));
  const from = condition.last_transition_unix_ms;
  text(partOf(row, "for"), from ? duration(clock.now - from) : "");
  if (from) attribute(partOf(row, "for"), "title", `since ${moment(from)}`);
  text(partOf(row, "reason"), condition.reason);
  text(partOf(row, "message"), condition.message);
}

// `clock.now` is the agent's time, `clock.passed` what has passed since the document was made; milliseconds.
export function showHeartbeats(beats, error, clock) {
  const on = Boolean(beats) && beats.state !== "disabled";
  show(byId("heartbeats-error"), beats ? "" : `Cannot read the heartbeats: ${error}.`);
  show(byId("heartbeats-off"), beats && !on ? `Disabled${beats.reason ? `: ${beats.reason}` : ""}.` : "");
  byId("heartbeats").hidden = !on;
  if (!on) return;
  const from = beats.failing_since_unix_ms;
  fact("beat", from ? `${statusWord(beats.state)} for ${duration(clock.now - from)}` : statusWord(beats.state), BEAT_TONES[beats.state], beats.reason);
  fact("role", beats.role, "", beats.node_name, beats.server);
  showCredentials(beats.credentials ?? [], beats.credential_warnings ?? [], clock);
  if (beats.lease) showLease(beats.lease, clock);
  else fact("lease", "none", "");
  if (beats.status) showStatus(beats.status, clock);
  else fact("status", "none", "");
  sync(byId("conditions"), beats.conditions, (condition) => condition.type, createCondition,
    (row, condition) => updateCondition(row, condition, clock));
  byId("conditions").parentElement.hidden = !beats.conditions.length;
  empty("conditions", beats.conditions.length);
}
