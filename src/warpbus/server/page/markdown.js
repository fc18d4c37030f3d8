// Markdown to DOM. The parser gives tokens; every node is made here by createElement and text, of the tags below only.
// Nothing that a model wrote is ever parsed as HTML.

import markdownit from "./vendor/markdown-it/markdown-it.esm.min.mjs";
import hljs from "./vendor/highlight.js/highlight.min.js";
import { addMath, formula, plain } from "./math.js";

const BLOCKS = {
  paragraph_open: "p", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li", blockquote_open: "blockquote",
  table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr", th_open: "th", td_open: "td",
};
const MARKS = { em_open: "em", strong_open: "strong", s_open: "s" };
const HIGHLIGHT_LIMIT = 50_000; // characters of one code block

// Lines of verse stay lines (breaks); README.md and such are file names, not hosts (no fuzzy links).
const parser = markdownit({ html: false, linkify: true, breaks: true, typographer: false });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
addMath(parser);

function element(tag, className) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return node;
}

/** A link if the address is http, https or mailto, else a span. */
function link(address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address ?? "")) return element("span");
  const node = element("a");
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function inline(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.type === "text" || token.type === "text_special" || token.type === "html_inline") top.append(token.content);
    else if (token.type === "softbreak" || token.type === "hardbreak") top.append(element("br"));
    else if (token.type === "math") top.append(formula(token.content, token.markup, token.meta));
    else if (token.type === "code_inline") top.appendChild(element("code")).textContent = token.content;
    else if (token.type in MARKS) open.push(top.appendChild(element(MARKS[token.type])));
    else if (token.type === "link_open") open.push(top.appendChild(link(token.attrGet("href"))));
    else if (token.type === "image") {
      // Loading it would tell its host that the answer was read.
      top.appendChild(link(token.attrGet("src"))).textContent = token.content || token.attrGet("src");
    } else if (token.nesting < 0) open.pop();
  }
}

/** "[ ] " or "[x] " at the start of a list's item becomes a box. */
function task(tokens, item) {
  const first = tokens.children[0];
  const found = first?.type === "text" && /^\[([ xX])\] /.exec(first.content);
  if (!found) return;
  first.content = first.content.slice(4);
  const box = element("input");
  box.type = "checkbox";
  box.disabled = true;
  box.checked = found[1] !== " ";
  box.setAttribute("aria-label", first.content.slice(0, 80));
  item.classList.add("task");
  item.prepend(box);
}

function codeBlock(content, info, actions) {
  const language = info.trim().split(/\s+/)[0].slice(0, 40);
  const block = element("div", "code");
  const head = block.appendChild(element("div", "code-head"));
  head.appendChild(element("span")).textContent = language || actions.label;
  const pre = block.appendChild(element("pre"));
  pre.tabIndex = 0;
  const code = pre.appendChild(element("code"));
  code.textContent = content;
  if (actions.button) head.append(actions.button(() => code.textContent));
  return block;
}

/** Colours a finished block: the highlighter's tree becomes spans. Longer or unknown code stays plain. */
function highlight(block, info) {
  const code = block.querySelector("code");
  const language = info.trim().split(/\s+/)[0];
  const source = code.textContent;
  if (!language || source.length > HIGHLIGHT_LIMIT || !hljs.getLanguage(language)) return;
  const build = (node, parent) => {
    for (const child of node.children) {
      if (typeof child === "string") parent.append(child);
      else {
        const scope = typeof child.scope === "string" ? child.scope.split(".")[0].replace(/\W/g, "-") : "";
        build(child, parent.appendChild(element("span", scope && `hl-${scope}`)));
      }
    }
  };
  const coloured = document.createDocumentFragment();
  build(hljs.highlight(source, { language, ignoreIllegals: true })._emitter.rootNode, coloured);
  code.replaceChildren(coloured);
}

/** The element of a heading: below the page's h1 and h2, and never a level deeper than what is above it asks for. */
function heading(tag, levels) {
  const level = Number(tag[1]);
  while (levels.length && levels.at(-1) >= level) levels.pop();
  levels.push(level);
  return `h${Math.min(6, levels.length + 2)}`;
}

/** The nodes of `tokens`; `finished` says whether code may be coloured already; `levels` are those of the headings above. */
function blocks(tokens, actions, finished, levels) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.type === "inline") {
      const item = top.tagName === "P" ? top.parentNode : top;
      if (item.tagName === "LI" && item.firstChild === (item === top ? null : top)) task(token, item);
      inline(token.children, top);
    } else if (token.type === "fence" || token.type === "code_block") {
      const block = top.appendChild(codeBlock(token.content, token.info, actions));
      if (finished) highlight(block, token.info);
    } else if (token.type === "math_block") {
      const paragraph = top.appendChild(element("p"));
      paragraph.append(token.meta ? formula(token.content, token.markup, true) : plain(token.markup));
    } else if (token.type === "hr") top.append(element("hr"));
    else if (token.nesting > 0) {
      if (token.hidden) {
        open.push(top); // a paragraph of a tight list
        continue;
      }
      const node = element((token.type === "heading_open" && heading(token.tag, levels)) || BLOCKS[token.type] || "div");
      if (token.type === "ordered_list_open") node.start = Number(token.attrGet("start") ?? 1);
      const align = /text-align:(center|right)/.exec(token.attrGet("style") ?? "");
      if (align) node.className = align[1];
      if (token.type === "table_open") top.appendChild(element("div", "table")).append(node);
      else top.append(node);
      open.push(node);
    } else if (token.nesting < 0) open.pop();
    else if (token.content) top.append(token.content);
  }
  return root;
}

/**
 * Renders a text that grows, into `root`. What precedes the last block is never touched again, so a stream costs what its
 * length does. `actions`: label (of code without a language), button(textOf) -> a node for the head of a code block.
 */
export class MarkdownView {
  constructor(root, actions = { label: "" }) {
    this.root = root;
    this.actions = actions;
    this.written = "";
    this.source = ""; // the same with line feeds only
    this.done = 0; // characters whose blocks are final
    this.env = {}; // link references, which later blocks may use
    this.levels = []; // of the final headings that the next one is below of
    this.tail = []; // nodes of what is not final
    this.finished = false;
  }

  /** Shows `written`, which begins with what was shown before; `finished` when no more comes. */
  update(written, finished = false) {
    this.written = written;
    const source = written.replace(/\r\n?/g, "\n");
    if (this.finished || !source.startsWith(this.source.slice(0, this.done))) {
      this.root.replaceChildren();
      this.env = {};
      this.done = 0;
      this.levels = [];
      this.tail = [];
    }
    this.source = source;
    this.finished = finished;
    const text = source.slice(this.done);
    const tokens = parser.parse(text, this.env);
    const cut = finished ? { token: tokens.length, line: 0 } : lastBlock(tokens, text);
    const last = tokens.slice(cut.token);
    if (cut.token === 0 && this.growCode(last)) return;
    for (const node of this.tail) node.remove();
    this.root.append(blocks(tokens.slice(0, cut.token), this.actions, true, this.levels));
    const rest = blocks(last, this.actions, false, [...this.levels]);
    this.tail = [...rest.childNodes];
    this.root.append(rest);
    if (!finished) this.done += startOfLine(text, cut.line);
  }

  /** A long block of code that is still being written only takes more text: a selection in it survives. */
  growCode(tokens) {
    const block = this.tail[0];
    if (tokens.length !== 1 || tokens[0].type !== "fence" || this.tail.length !== 1 || block.className !== "code") return false;
    if (block.querySelector("code").childNodes.length > 1) return false;
    const label = tokens[0].info.trim().split(/\s+/)[0].slice(0, 40) || this.actions.label;
    if (block.firstChild.firstChild.textContent !== label) return false;
    block.querySelector("code").textContent = tokens[0].content;
    return true;
  }
}

/** Where the last top-level block begins whose first line is complete: what comes before it cannot change any more. */
function lastBlock(tokens, text) {
  const complete = text.split("\n").length - 1; // lines that are ended
  let found = { token: 0, line: 0 };
  tokens.forEach((token, index) => {
    if (token.level === 0 && token.nesting >= 0 && token.map && token.map[0] < complete && token.type !== "inline") {
      found = { token: index, line: token.map[0] };
    }
  });
  return found;
}

function startOfLine(text, line) {
  let at = 0;
  for (let n = 0; n < line; n++) at = text.indexOf("\n", at) + 1;
  return at;
}
