// Small tools for the page's elements. In: elements, and values as text. Out: the changes that are needed, no others.

export const byId = (id) => document.getElementById(id);

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function attribute(element, name, value) {
  const wanted = String(value);
  if (element.getAttribute(name) !== wanted) element.setAttribute(name, wanted);
}

export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function partOf(element, name) {
  return element.querySelector(`[data-part="${name}"]`);
}

export function slot(tag, name, className = "") {
  const element = make(tag, className);
  element.dataset.part = name;
  return element;
}

export function show(element, value) {
  text(element, value);
  element.hidden = value === "";
}

// Makes the keyed children of `parent` those of `items`, in order, keeping the elements of items that
// stay. Children without a key (the head of a table) come first and are left alone.
export function sync(parent, items, key, create, update) {
  const keyed = [...parent.children].filter((child) => child.dataset.key !== undefined);
  const old = new Map(keyed.map((child) => [child.dataset.key, child]));
  let next = keyed[0] ?? null;
  for (const item of items) {
    const name = String(key(item));
    let element = old.get(name);
    old.delete(name);
    if (!element) {
      element = create(item);
      element.dataset.key = name;
    }
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
    update(element, item);
  }
  for (const element of old.values()) element.remove();
}

export function moment(ms) {
  return new Date(ms).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}

export function cell(name, className = "") {
  const element = slot("td", name, className);
  element.setAttribute("role", "cell");
  return element;
}

// A value of note, its tone, and what there is to say of it.
export function fact(name, value, tone, ...notes) {
  text(byId(name), value);
  byId(name).dataset.tone = tone ?? "";
  text(byId(`${name}-note`), notes.filter(Boolean).join(" · "));
}

export function empty(name, count) {
  document.querySelector(`[data-empty="${name}"]`).hidden = count > 0;
}

export function badge(label, tone = "") {
  const made = make("span", "badge", label);
  made.dataset.tone = tone;
  return made;
}

const VERDICTS = { forwarded: "good", dropped: "bad", rejected: "bad", untouched: "info" };

// What becomes of a packet.
export const verdict = (name) => badge(name, VERDICTS[name]);

export function rawLink(address) {
  const link = make("a", "small", "as JSON");
  link.href = address;
  return link;
}
