// The few ways in which the page makes elements.

import { t } from "./language.js";

export const $ = (id) => document.getElementById(id);

export function make(tag, className = "", content = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (content) node.textContent = content;
  return node;
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("aria-hidden", "true");
  svg.appendChild(document.createElementNS(space, "use")).setAttribute("href", `#i-${name}`);
  return svg;
}

/** A button that is an icon; its label is its tooltip too. */
export function iconButton(name, label, onClick) {
  const button = make("button", "icon");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  button.addEventListener("click", onClick);
  return button;
}

export function textButton(label, onClick, className = "quiet") {
  const button = make("button", className, label);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

/** A button that copies what `textOf` returns, and shows for a moment that it has. */
export function copyButton(textOf, label = t("copy")) {
  const button = iconButton("copy", label, async () => {
    const copied = await copy(textOf());
    if (!copied) {
      toast(t("copyFailed"));
      return;
    }
    button.replaceChildren(icon("done"));
    button.setAttribute("aria-label", t("copied"));
    announce(t("copied"));
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard interface; the old command still works.
    const area = document.body.appendChild(make("textarea", "hidden"));
    area.value = text;
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

/** Gives the reader a file. */
export function download(name, content, type) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = make("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

let hiding = 0;

/** A sentence at the bottom for some seconds, with a button where `action` is given. */
export function toast(sentence, label = "", action = null) {
  const node = $("toast");
  node.replaceChildren(make("span", "", sentence));
  if (action) {
    node.append(
      textButton(label, () => {
        node.hidden = true;
        action();
      }),
    );
  }
  node.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => (node.hidden = true), action ? 8000 : 5000);
}

/** Lets a screen reader say it when it has nothing else to say. */
export function announce(sentence) {
  $("announcer").textContent = sentence;
}
