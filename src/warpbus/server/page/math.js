// Formulas: where they are in Markdown, and KaTeX's elements of them.

import "./vendor/katex/katex.min.js"; // defines globalThis.katex

const LONGEST = 10_000; // characters of a formula
const OPTIONS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500 };
const INLINE = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true]];

/** Where an unescaped `end` is in `text` at or behind `from`, or -1. */
function findEnd(text, end, from) {
  for (let at = text.indexOf(end, from); at >= 0; at = text.indexOf(end, at + 1)) {
    let slashes = 0;
    while (text[at - 1 - slashes] === "\\") slashes += 1;
    if (slashes % 2 === 0) return at;
  }
  return -1;
}

/** \(a\), \[a\], $$a$$; and $a$, but not with spaces inside its ends or a letter or digit behind it: prices remain text. */
function inlineMath(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "\\" && src[pos] !== "$") return false;
  let [begin, end, display] = INLINE.find(([start]) => src.startsWith(start, pos)) ?? [];
  if (!begin) {
    if (src[pos] !== "$" || /[\s$]/.test(src[pos + 1] ?? " ")) return false;
    [begin, end, display] = ["$", "$", false];
  }
  state.cache.noMath ??= {}; // where a search found no end, so that a text of many dollars takes linear time
  if (state.cache.noMath[end] <= pos) return false;
  const from = pos + begin.length;
  const at = findEnd(src, end, from);
  if (at < 0) state.cache.noMath[end] = pos;
  if (at <= from || at >= state.posMax || at - from > LONGEST) return false;
  if (begin === "$" && (/\s/.test(src[at - 1]) || /\w/.test(src[at + 1] ?? "") || src.slice(from, at).includes("`"))) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = src.slice(from, at);
    token.markup = src.slice(pos, at + end.length);
    token.meta = display;
  }
  state.pos = at + end.length;
  return true;
}

/**
 * A formula of lines of its own, without empty lines: $$, \[ or \begin{...}. Its first line alone decides that it is one, so
 * that a text which grows never changes the blocks before it. Where the text ends first, the formula is still open.
 */
function blockMath(state, first, last, silent) {
  const start = state.bMarks[first] + state.tShift[first];
  if (state.sCount[first] - state.blkIndent >= 4) return false;
  const line = state.src.slice(start, state.eMarks[first]);
  const environment = /^\\begin\{([a-zA-Z]+\*?)\}/.exec(line);
  const begin = ["$$", "\\["].find((mark) => line.startsWith(mark)) ?? environment?.[0];
  if (!begin) return false;
  const end = environment ? `\\end{${environment[1]}}` : begin === "$$" ? "$$" : "\\]";
  let at = findEnd(line, end, begin.length);
  if (at >= 0 && line.slice(at + end.length).trim()) return false; // more text behind it: part of a paragraph
  if (silent) return true;
  let next = first;
  let source = line;
  let text = line;
  while (at < 0 && ++next < last && !state.isEmpty(next) && state.sCount[next] >= state.blkIndent) {
    text = state.getLines(next, next + 1, state.blkIndent, false);
    at = findEnd(text, end, 0);
    source += `\n${at < 0 ? text : text.slice(0, at + end.length)}`;
  }
  const closed = at >= 0;
  state.line = closed ? next + 1 : next;
  if (closed || next >= last) {
    const token = state.push("math_block", "", 0);
    token.block = true;
    token.map = [first, state.line];
    token.markup = source;
    token.content = environment ? source : source.slice(begin.length, source.length - end.length);
    token.meta = closed && source.length <= LONGEST;
  } else pushParagraph(state, first, source);
  if (closed && text.slice(at + end.length).trim()) pushParagraph(state, next, text.slice(at + end.length).trim());
  return true;
}

function pushParagraph(state, line, content) {
  state.push("paragraph_open", "p", 1).map = [line, state.line];
  const token = state.push("inline", "", 0);
  token.content = content;
  token.map = [line, state.line];
  token.children = [];
  state.push("paragraph_close", "p", -1);
}

export function addMath(parser) {
  parser.inline.ruler.before("escape", "math", inlineMath);
  parser.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "blockquote", "list"] });
}

/** The formula's element; one that KaTeX does not understand is shown as it was written (`markup`). */
export function formula(source, markup, display) {
  const node = document.createElement("span");
  node.className = display ? "formula display" : "formula";
  if (display) node.tabIndex = 0; // it may be wider than the column, and is scrolled
  try {
    const tree = globalThis.katex.__renderToDomTree(source, { ...OPTIONS, displayMode: display });
    node.append(withStyles(tree));
  } catch {
    return plain(markup);
  }
  return node;
}

export function plain(markup) {
  const node = document.createElement("code");
  node.className = "formula-source";
  node.textContent = markup;
  return node;
}

/** The elements of KaTeX's tree. The page's policy forbids style attributes, so they are set as properties instead. */
function withStyles(tree) {
  const walk = (node) => {
    if (node.attributes?.style !== undefined) {
      node.attributes["data-style"] = node.attributes.style;
      delete node.attributes.style;
    }
    for (const child of node.children ?? []) walk(child);
  };
  walk(tree);
  const element = tree.toNode();
  for (const styled of element.querySelectorAll("[data-style]")) {
    for (const rule of styled.getAttribute("data-style").split(";")) {
      const at = rule.indexOf(":");
      if (at > 0) styled.style.setProperty(rule.slice(0, at).trim(), rule.slice(at + 1).trim());
    }
    styled.removeAttribute("data-style");
  }
  return element;
}

/** What a screen reader is to say of `root`: formulas by their source, not twice. */
export function spokenText(root) {
  const copy = root.cloneNode(true);
  for (const node of copy.querySelectorAll(".formula")) node.replaceWith(node.querySelector("annotation")?.textContent ?? "");
  return copy.textContent.trim();
}
