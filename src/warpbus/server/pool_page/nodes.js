// Changing what is shown without making it again, so that the focus, a selection and an open tooltip stay.

import { make } from "./dom.js";

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** The child of a class, made where it is missing, with a text; hidden where the text is empty. */
export function say(parent, name, text, tag = "span") {
  const node = part(parent, name, tag);
  setText(node, text);
  node.hidden = !text;
  return node;
}

/** The child of a class, made where it is missing. */
export function part(parent, name, tag = "span") {
  for (const child of parent.children) if (child.classList.contains(name)) return child;
  return parent.appendChild(make(tag, name));
}

const known = new WeakMap(); // parent -> its children by key

/** Lets `parent` have a child for each item, in order: made once by `create`, brought up to date by `fill`. */
export function keep(parent, items, keyOf, create, fill) {
  const before = known.get(parent) ?? new Map();
  const now = new Map();
  items.forEach((item, index) => {
    const key = String(keyOf(item, index));
    if (!now.has(key)) now.set(key, before.get(key) ?? create(item));
  });
  for (const [key, child] of before) if (!now.has(key)) child.remove();
  known.set(parent, now);
  let place = parent.firstElementChild;
  items.forEach((item, index) => {
    const child = now.get(String(keyOf(item, index)));
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    fill(child, item, index);
  });
}
