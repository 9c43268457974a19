// Pulls as people read them. In: values of the debug API. Out: text.

// Done as a part of 0 to 1, or null while the whole is unknown.
export function part(progress) {
  if (!progress || !progress.bytes_total) return null;
  return Math.min(1, progress.bytes_done / progress.bytes_total);
}

// Milliseconds to go at the speed of the last seconds, or null.
export function left(progress) {
  if (!progress || !progress.bytes_total || !progress.bytes_per_second) return null;
  const bytesLeft = progress.bytes_total - progress.bytes_done;
  return bytesLeft > 0 ? (bytesLeft / progress.bytes_per_second) * 1000 : null;
}

// A name in three parts: where it comes from, what it is, which one it is.
export function image(name) {
  const at = name.indexOf("@");
  const digest = at < 0 ? "" : name.slice(at);
  const rest = at < 0 ? name : name.slice(0, at);
  const slash = rest.lastIndexOf("/");
  const colon = rest.indexOf(":", slash + 1);
  const tag = colon < 0 ? "" : rest.slice(colon);
  const base = colon < 0 ? rest.slice(slash + 1) : rest.slice(slash + 1, colon);
  const short = /^@sha256:[0-9a-f]{13,}$/.test(digest) ? `${digest.slice(0, 20)}…` : digest;
  return { from: rest.slice(0, slash + 1), base, version: tag + short };
}

const STATES = {
  checking: "checking",
  queued: "queued",
  running: "running",
  running_present: "already present",
  waiting_for_runtime: "waiting for runtime",
  retrying: "retrying",
  held: "held",
  abandoned: "abandoned",
  succeeded: "done",
  failed: "failed",
  cancelled: "cancelled",
};

export function state(name) {
  return STATES[name] ?? String(name);
}
