// Numbers, times and names as people read them. In: values of the debug API. Out: text.

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

export function bytes(count) {
  if (count < 1024) return `${count} B`;
  let value = count / 1024;
  let unit = 0;
  while (value >= 1023.95 && unit + 1 < UNITS.length) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 99.95 ? value.toFixed(1) : value.toFixed(0)} ${UNITS[unit]}`;
}

export function duration(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const two = (n) => String(n).padStart(2, "0");
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${two(Math.floor((seconds % 3600) / 60))} min`;
  return `${Math.floor(seconds / 86400)} d ${two(Math.floor((seconds % 86400) / 3600))} h`;
}

export function micros(us) {
  if (us < 1000) return `${us} µs`;
  if (us < 1e6) return `${(us / 1e3).toFixed(1)} ms`;
  return `${(us / 1e6).toFixed(1)} s`;
}

export function number(count) {
  return count.toLocaleString("en");
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

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

const STATUS_WORDS = {
  well: "healthy",
  current: "synced",
  off: "disabled",
  starting: "pending",
  waiting: "pending",
  "not-watched": "pending",
};

// A state of the debug API as a status word of the glossary.
export function statusWord(name) {
  return STATUS_WORDS[name] ?? String(name);
}
