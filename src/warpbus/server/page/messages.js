// The messages of one conversation as the page shows them. Knows nothing of the network or the storage.

import { announce, copyButton, iconButton, make, textButton, $ } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { number, t } from "./language.js";

/** The text of an answer with what is known about it, below it what can be done with it. */
class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = make("article", "answer");
    this.node.setAttribute("aria-label", this.version.model || t("model"));
    this.body = this.node.appendChild(make("div", "markdown"));
    this.foot = this.node.appendChild(make("div", "foot"));
    this.markdown = new MarkdownView(this.body, { label: t("code"), button: (textOf) => copyButton(textOf, t("copyCode")) });
    this.due = 0;
    this.cost = 0;
  }

  get version() {
    return this.message.versions[this.message.current];
  }

  /** While an answer comes: at most one rendering a frame, and at most a third of the time spent on it. */
  grow(afterwards) {
    if (this.due) return;
    this.due = setTimeout(() => {
      this.due = 0;
      const before = performance.now();
      this.node.classList.toggle("waiting", this.version.content === "");
      this.markdown.update(this.version.content);
      afterwards();
      this.cost = performance.now() - before;
    }, Math.max(30, 2 * this.cost));
  }

  begin() {
    this.node.classList.add("streaming", "waiting");
    this.node.setAttribute("aria-busy", "true");
    this.body.setAttribute("aria-label", t("thinking"));
    this.markdown.update(this.version.content);
    this.foot.replaceChildren();
  }

  /** `last`: this is the end of the conversation, so that it can be done again or continued. */
  finish(last) {
    this.discard();
    this.node.classList.remove("streaming", "waiting");
    this.node.removeAttribute("aria-busy");
    this.body.removeAttribute("aria-label");
    if (!this.markdown.finished || this.markdown.written !== this.version.content) {
      this.markdown.update(this.version.content, true);
    }
    this.foot.replaceChildren(...this.footer(last));
  }

  /** No rendering comes any more. */
  discard() {
    clearTimeout(this.due);
    this.due = 0;
  }

  footer(last) {
    const { content, finish, model, stats } = this.version;
    const nodes = [];
    const ending = { length: t("truncated"), stopped: t("stopped"), stop: content.trim() ? "" : t("emptyAnswer") }[finish] ?? t("interrupted");
    if (ending) {
      const line = make("p", "ending", ending);
      if (last && finish !== "stop" && content) line.append(textButton(t("continue"), this.actions.continue));
      nodes.push(line);
    }
    const bar = make("div", "bar");
    bar.append(copyButton(() => this.version.content));
    if (last) bar.append(iconButton("again", t("regenerate"), this.actions.regenerate));
    if (this.message.versions.length > 1) bar.append(this.versions(last));
    bar.append(make("span", "by", model), make("span", "stats", describe(stats)));
    return [...nodes, bar];
  }

  versions(last) {
    const { versions, current } = this.message;
    const group = make("span", "versions");
    const count = make("span", "", `${current + 1}/${versions.length}`);
    count.title = t("version", { n: current + 1, of: versions.length });
    const step = (name, label, to) => {
      const button = iconButton(name, label, () => {
        this.message.current = to;
        this.finish(last);
        this.actions.changed();
        this.foot.querySelector(".versions button:enabled").focus();
      });
      button.disabled = !versions[to];
      return button;
    };
    group.append(step("left", t("previousVersion"), current - 1), count, step("right", t("nextVersion"), current + 1));
    return group;
  }
}

function describe({ prompt, cached, completion, first, speed }) {
  const parts = [];
  if (prompt !== null) parts.push(cached ? t("statsCached", { n: number(prompt), cached: number(cached) }) : t("statsIn", { n: number(prompt) }));
  if (completion !== null) parts.push(t("statsOut", { n: number(completion) }));
  if (speed !== null) parts.push(t("statsSpeed", { n: number(speed, speed < 100 ? 1 : 0) }));
  if (first !== null) parts.push(t("statsFirst", { n: number(first, 2) }));
  return parts.join(" · ");
}

/** Everything between the top bar and the composer. */
export class MessagesView {
  /** `actions`: edit, regenerate, continue, changed - called without arguments, about the conversation shown. */
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
    const { messages } = conversation ?? { messages: [] };
    $("welcome").hidden = messages.length > 0;
    this.answer?.discard();
    this.answer = null;
    const lastQuestion = messages.findLastIndex((message) => message.role === "user");
    const nodes = messages.map((message, index) => {
      if (message.role === "user") return this.question(message, index === lastQuestion && !streaming);
      const last = index === messages.length - 1;
      const view = this.views.get(message) ?? new AnswerView(message, this.actions);
      this.views.set(message, view);
      if (last) this.answer = view;
      if (last && streaming) {
        view.begin();
        view.grow(() => this.follow());
      } else view.finish(last);
      return view.node;
    });
    $("messages").replaceChildren(...nodes);
    if (keepPlace && !this.atBottom) $("scroll").scrollTop = place;
    else this.toBottom();
  }

  /** The language is another one. */
  forget() {
    this.views = new WeakMap();
  }

  question(message, last) {
    const node = make("article", "question");
    node.setAttribute("aria-label", t("you"));
    node.append(make("div", "bubble", message.content));
    const bar = node.appendChild(make("div", "bar"));
    bar.append(copyButton(() => message.content));
    if (last) bar.append(iconButton("edit", t("edit"), this.actions.edit));
    return node;
  }

  grow() {
    this.answer?.grow(() => this.follow());
  }

  announceAnswer() {
    const spoken = this.answer?.body.textContent.trim() ?? "";
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
