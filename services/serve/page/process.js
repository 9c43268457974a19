// The process behind the page: its events, its clock and its answers. In: the server that the page comes from.

import { byId, show, text } from "./dom.js";
import { duration } from "./format.js";

const SILENCE_MS = 15_000; // Events come at least every 5 s.
const RETRY_MS = [500, 1_000, 2_000, 5_000];
const ANSWER_MS = 10_000;
const WORDS = { connecting: "connecting", live: "live", lost: "connection lost" };

let source = null;
let failures = 0;
let retry = 0;
let received = 0; // When the last event came, by this machine's clock.
let clockAhead = 0; // The clock of the process minus this machine's.

export const now = () => Date.now() + clockAhead;
export const since = (ms) => duration(now() - ms);
export const ago = (ms) => (ms ? `${since(ms)} ago` : "");

// A document, or an error with the text of the server.
export async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(ANSWER_MS) });
  const document = await response.json();
  if (!response.ok) throw new Error(document.error ?? `status ${response.status}`);
  return document;
}

function connection(state) {
  document.body.dataset.connection = state;
  const pill = byId("connection");
  pill.dataset.state = state;
  text(pill, WORDS[state]);
}

// Gives each event to the handler of its name, then calls `render`, and once a second, so that ages go on. While the
// connection is lost, `lost` is shown: what it is lost to, and a sentence on what that means.
export function follow(handlers, render, lost) {
  const [what, meaning] = lost;

  function connect() {
    clearTimeout(retry);
    source?.close();
    source = new EventSource("/debug/events");
    const mine = source;
    const opened = Date.now();
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        const document = JSON.parse(event.data);
        if (document.now_unix_ms) {
          received = Date.now();
          clockAhead = document.now_unix_ms - received;
          failures = 0;
          connection("live");
          byId("lost").hidden = true;
        }
        handler(document);
        render();
      });
    }
    source.onerror = () => lose(mine);
    source.heardSince = () => Math.max(opened, received);
  }

  function lose(which) {
    if (which !== source) return;
    which.close();
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    connection("lost");
    const known = received ? ` The data is from ${new Date(received).toLocaleTimeString()}.` : "";
    show(byId("lost"), `Disconnected from the ${what}.${known} ${meaning}`);
    clearTimeout(retry);
    retry = setTimeout(connect, wait);
  }

  setInterval(() => {
    const open = source && source.readyState !== EventSource.CLOSED;
    if (open && Date.now() - source.heardSince() > SILENCE_MS) lose(source);
    if (document.body.dataset.connection === "live" && !document.hidden) render();
  }, 1_000);
  connect();
}
