// What our pages say, in the reader's language: English or Chinese.

let tables = { en: {}, zh: {} };
let language = "en";

/** The page's sentences by language and name; {name} in one is replaced by a value. */
export function speak(sentences) {
  tables = sentences;
}

/** "en" or "zh": the choice, and for "auto" what the browser prefers. */
export function setLanguage(choice) {
  const preferred = (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
  language = choice in tables ? choice : preferred;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  return language;
}

export function t(key, values = {}) {
  return tables[language][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** A number as the language writes it. */
export function number(value, digits = 0) {
  return value.toLocaleString(document.documentElement.lang, { maximumFractionDigits: digits });
}

/** Fills every element below `root` that names a string in data-t, data-t-label (label and tooltip) or data-t-placeholder. */
export function translate(root) {
  for (const node of root.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of root.querySelectorAll("[data-t-placeholder]")) node.placeholder = t(node.dataset.tPlaceholder);
  for (const node of root.querySelectorAll("[data-t-label]")) {
    node.setAttribute("aria-label", t(node.dataset.tLabel));
    if (node.tagName === "BUTTON") node.title = t(node.dataset.tLabel);
  }
}
