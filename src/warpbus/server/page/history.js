// The list of conversations at the side: groups by day, search, rename, delete.

import { $, iconButton, make } from "./dom.js";
import { t } from "./language.js";

const DAY = 86_400_000;

function group(updated, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (updated >= midnight) return "today";
  if (updated >= midnight - DAY) return "yesterday";
  return updated >= midnight - 7 * DAY ? "week" : "older";
}

export class HistoryView {
  /** `actions`: open(id), rename(id, title), remove(id). */
  constructor(store, actions) {
    this.store = store;
    this.actions = actions;
    this.renaming = null;
    $("search").addEventListener("input", () => this.show());
  }

  /** A search would hide a conversation that begins. */
  clearSearch() {
    $("search").value = "";
  }

  /** `current` is the id shown, `running(id)` tells whether an answer is coming there; without arguments both stay. */
  show(current = this.current, running = this.running) {
    if (this.renaming) return;
    this.current = current;
    this.running = running;
    const search = $("search").value;
    const found = this.store.list(search);
    const now = Date.now();
    const nodes = [];
    let list = null;
    let title = "";
    for (const conversation of found) {
      const named = group(conversation.updated, now);
      if (named !== title) {
        title = named;
        const heading = make("h2", "", t(named));
        heading.id = `group-${named}`;
        list = make("ul");
        list.setAttribute("aria-labelledby", heading.id);
        nodes.push(heading, list);
      }
      list.append(this.item(conversation));
    }
    if (!found.length) nodes.push(make("p", "note", t(search.trim() ? "nothingFound" : "noConversations")));
    $("conversations").replaceChildren(...nodes);
  }

  item({ id, title }) {
    const node = make("li");
    const open = make("button", "open", title);
    open.type = "button";
    open.title = title;
    if (id === this.current) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.actions.open(id));
    const tools = make("span", "tools");
    tools.append(
      iconButton("edit", `${t("rename")}: ${title}`, () => this.rename(node, id, title)),
      iconButton("delete", `${t("delete")}: ${title}`, () => this.actions.remove(id)),
    );
    if (this.running?.(id)) {
      const sign = make("span", "running");
      sign.setAttribute("role", "img");
      sign.setAttribute("aria-label", t("answering"));
      open.append(sign);
    }
    node.append(open, tools);
    return node;
  }

  rename(node, id, title) {
    const input = make("input");
    input.value = title;
    input.maxLength = 200;
    input.setAttribute("aria-label", t("title"));
    this.renaming = id;
    const end = (keep) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      const named = input.value.trim();
      if (keep && named && named !== title) this.actions.rename(id, named);
      this.show();
      [...$("conversations").querySelectorAll(".open")].find((open) => open.title === (keep ? named : title))?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") end(true);
      else if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    input.addEventListener("blur", () => end(true));
    node.replaceChildren(input);
    input.select();
  }
}
