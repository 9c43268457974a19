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

// The first names of a list and how many there are beside them.
export function listed(names, most) {
  const more = names.length - most;
  const first = names.slice(0, most).join(", ");
  return more > 0 ? `${first} and ${number(more)} more` : first;
}

// A state of the debug API as a status word of the glossary.
export function statusWord(name) {
  return name === "not-watched" ? "pending" : String(name);
}
