// The messages of one conversation as the page shows them. Knows nothing of the network or the storage.

import { isEmpty, versionOf } from "./conversation.js";
import { announce, copyButton, icon, iconButton, make, textButton, $ } from "./dom.js";
import { number, t } from "./language.js";
import { MarkdownView } from "./markdown.js";
import { spokenText } from "./math.js";

const markdownView = (root) => new MarkdownView(root, { label: t("code"), button: (textOf) => copyButton(textOf, t("copyCode")) });

/** "2/3" with a button on each side, for a message of several versions. */
function versionButtons(message, change) {
  const { versions, current } = message;
  const group = make("span", "versions");
  const count = make("span", "", `${current + 1}/${versions.length}`);
  count.title = t("version", { n: current + 1, of: versions.length });
  const step = (name, label, to) => {
    const button = iconButton(name, label, () => change(to));
    button.disabled = !versions[to];
    return button;
  };
  group.append(step("left", t("previousVersion"), current - 1), count, step("right", t("nextVersion"), current + 1));
  return group;
}

/** A label and a text that is opened by it. */
function folded(className, label, text) {
  const node = make("details", className);
  node.append(make("summary", "", label), make("pre", "", text));
  node.lastChild.tabIndex = 0;
  return node;
}

/** A question with its files. */
function questionNode(message, index, busy, actions) {
  const { content, files } = versionOf(message);
  const node = make("article", "question");
  node.setAttribute("aria-label", t("you"));
  node.append(make("h2", "hidden", t("you")));
  for (const { name, text } of files) {
    node.append(folded("file", `${name} · ${t("fileSize", { n: number(text.length) })}`, text));
  }
  if (content) node.append(make("div", "bubble", content));
  const bar = node.appendChild(make("div", "bar"));
  bar.append(copyButton(() => content));
  if (!busy) bar.append(iconButton("edit", t("edit"), () => actions.edit(index)));
  if (message.versions.length > 1 && !busy) {
    bar.classList.add("kept");
    bar.append(versionButtons(message, (to) => actions.change(index, to)));
  }
  return node;
}

/** The results that were sent for an answer's calls. */
function resultsNode(message) {
  const node = make("article", "results");
  node.setAttribute("aria-label", t("results"));
  node.append(make("h2", "hidden", t("results")));
  for (const { name, content } of versionOf(message).results) node.append(folded("file", t("resultOf", { name }), content));
  return node;
}

/** The text of an answer with what is known about it, below it what can be done with it. */
class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = make("article", "answer");
    this.heading = this.node.appendChild(make("h2", "hidden"));
    this.thinking = null; // an element where the model thought
    this.body = this.node.appendChild(make("div", "markdown said"));
    this.calls = this.node.appendChild(make("div", "calls"));
    this.foot = this.node.appendChild(make("div", "foot"));
    this.markdown = markdownView(this.body);
    this.due = 0;
    this.cost = 0;
  }

  get version() {
    return versionOf(this.message);
  }

  /** While an answer comes: at most one rendering a frame, and at most a third of the time spent on it. */
  grow(afterwards) {
    if (this.due) return;
    this.due = setTimeout(() => {
      this.due = 0;
      const before = performance.now();
      this.render();
      afterwards();
      this.cost = performance.now() - before;
    }, Math.max(30, 2 * this.cost));
  }

  render() {
    this.node.classList.toggle("waiting", this.streaming && isEmpty(this.version));
    this.showThinking();
    this.markdown.update(this.version.content);
    this.showCalls(false);
  }

  begin() {
    this.streaming = true;
    this.node.classList.add("streaming");
    this.node.setAttribute("aria-busy", "true");
    this.name();
    this.render();
    this.foot.replaceChildren();
  }

  /** `index` of the message; `last`: this is the end of the conversation; `busy`: another answer is coming. */
  finish(index, last, busy) {
    this.discard();
    this.streaming = false;
    this.node.classList.remove("streaming", "waiting");
    this.node.removeAttribute("aria-busy");
    this.name();
    this.showThinking();
    if (!this.markdown.finished || this.markdown.written !== this.version.content) {
      this.markdown.update(this.version.content, true);
    }
    this.showCalls(last && !busy && this.version.finish === "stop");
    this.foot.replaceChildren(...this.footer(index, last, busy));
  }

  name() {
    this.heading.textContent = this.version.model || t("model");
    this.node.setAttribute("aria-label", this.heading.textContent);
  }

  /** No rendering comes any more. */
  discard() {
    clearTimeout(this.due);
    this.due = 0;
  }

  /** What the model thought is folded, and rendered only while it is open. */
  showThinking() {
    const { reasoning, thought, content, calls } = this.version;
    if (!reasoning) {
      this.thinking?.remove();
      this.thinking = null;
      return;
    }
    if (!this.thinking) {
      this.thinking = make("details", "reasoning");
      this.thinking.append(make("summary"), make("div", "markdown"));
      this.thinking.addEventListener("toggle", () => this.showThinking());
      this.thought = markdownView(this.thinking.lastChild);
      this.body.before(this.thinking);
    }
    const thinks = this.streaming && !content && !calls.length;
    this.thinking.classList.toggle("running", thinks);
    const label = thinks ? t("thinkingNow") : thought === null ? t("thought") : t("thoughtFor", { n: number(Math.max(thought, 0.1), thought < 10 ? 1 : 0) });
    if (this.thinking.firstChild.textContent !== label) this.thinking.firstChild.textContent = label;
    if (this.thinking.open) this.thought.update(reasoning, !thinks);
  }

  /** `asked`: the results of the calls can be given. */
  showCalls(asked) {
    const { calls } = this.version;
    const shown = JSON.stringify([calls, asked]);
    if (this.shownCalls === shown) return;
    this.shownCalls = shown;
    const nodes = calls.map(({ name, arguments: given }) => {
      const node = make("section", "call");
      const head = make("h3", "call-head");
      head.append(icon("tool"), make("span", "", t("calls", { name })));
      node.append(head, make("pre", "", pretty(given)));
      node.lastChild.tabIndex = 0;
      if (asked) {
        const field = make("label", "field");
        field.append(make("span", "", t("resultOf", { name })), make("textarea"));
        field.lastChild.rows = 2;
        node.append(field);
      }
      return node;
    });
    if (asked && calls.length) {
      const results = () =>
        calls.map(({ id, name }, index) => ({ id, name, content: nodes[index].querySelector("textarea").value }));
      nodes.push(textButton(t("sendResults"), () => this.actions.results(results())));
    }
    this.calls.replaceChildren(...nodes);
  }

  footer(index, last, busy) {
    const { content, finish, model, stats } = this.version;
    const nodes = [];
    const said = !isEmpty(this.version);
    const ending = { length: t("truncated"), stopped: t("stopped"), stop: said ? "" : t("emptyAnswer") }[finish] ?? t("interrupted");
    if (ending) {
      const line = make("p", "ending", ending);
      if (last && !busy && finish !== "stop" && content) line.append(textButton(t("continue"), this.actions.continue));
      nodes.push(line);
    }
    const bar = make("div", "bar");
    bar.append(copyButton(() => this.version.content));
    if (!busy) bar.append(iconButton("again", t("regenerate"), () => this.actions.regenerate(index)));
    if (this.message.versions.length > 1 && !busy) {
      bar.append(versionButtons(this.message, (to) => this.actions.change(index, to)));
    }
    bar.append(make("span", "by", model), make("span", "stats", describe(stats)));
    return [...nodes, bar];
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function describe({ prompt, cached, completion, reasoning, first, speed }) {
  const parts = [];
  if (prompt !== null) parts.push(cached ? t("statsCached", { n: number(prompt), cached: number(cached) }) : t("statsIn", { n: number(prompt) }));
  if (completion !== null) {
    parts.push(reasoning ? t("statsThought", { n: number(completion), thought: number(reasoning) }) : t("statsOut", { n: number(completion) }));
  }
  if (speed !== null) parts.push(t("statsSpeed", { n: number(speed, speed < 100 ? 1 : 0) }));
  if (first !== null) parts.push(t("statsFirst", { n: number(first, 2) }));
  return parts.join(" · ");
}

/** Everything between the top bar and the composer. */
export class MessagesView {
  /**
   * `actions`, about the conversation shown: edit(index), regenerate(index), change(index, version), continue(),
   * results([{id, name, content}]).
   */
  constructor(actions) {
    this.actions = actions;
    this.answer = null; // the view of the last message where it is an answer
    this.views = new WeakMap(); // message -> its AnswerView: a long conversation is not rendered anew for each answer
    this.atBottom = true;
    const scroll = $("scroll");
    scroll.addEventListener("scroll", () => {
      this.atBottom = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
      $("bottom").hidden = this.atBottom;
    });
    $("bottom").addEventListener("click", () => this.toBottom());
    new ResizeObserver(() => this.follow()).observe(scroll);
  }

  /** Shows a conversation, or none; `streaming` where its last answer is still coming. Goes to the end unless `keepPlace`. */
  show(conversation, streaming, keepPlace) {
    const place = $("scroll").scrollTop;
    const { title, messages } = conversation ?? { messages: [] };
    $("welcome").hidden = messages.length > 0;
    $("heading").hidden = messages.length === 0;
    $("heading").textContent = title ?? "";
    this.answer?.discard();
    this.answer = null;
    const nodes = messages.map((message, index) => {
      if (message.role === "user") return questionNode(message, index, streaming, this.actions);
      if (message.role === "tool") return resultsNode(message);
      const last = index === messages.length - 1;
      const view = this.views.get(message) ?? new AnswerView(message, this.actions);
      this.views.set(message, view);
      if (last) this.answer = view;
      if (last && streaming) {
        view.begin();
        view.grow(() => this.follow());
      } else view.finish(index, last, streaming);
      return view.node;
    });
    $("messages").replaceChildren(...nodes);
    if (keepPlace && !this.atBottom) $("scroll").scrollTop = place;
    else this.toBottom();
  }

  /** The keyboard stays where a version was chosen. */
  focusVersions(index) {
    $("messages").children[index].querySelector(".versions button:enabled")?.focus();
  }

  /** The language is another one. */
  forget() {
    this.views = new WeakMap();
  }

  grow() {
    this.answer?.grow(() => this.follow());
  }

  announceAnswer() {
    const spoken = this.answer ? spokenText(this.answer.body) : "";
    announce(t("finished", { text: spoken.length > 600 ? `${spoken.slice(0, 600)} …` : spoken }));
  }

  toBottom() {
    this.atBottom = true;
    $("bottom").hidden = true;
    this.follow();
  }

  /** Stays at the end only where the reader is there already. */
  follow() {
    const scroll = $("scroll");
    if (this.atBottom) scroll.scrollTop = scroll.scrollHeight;
    else $("bottom").hidden = false;
  }
}
