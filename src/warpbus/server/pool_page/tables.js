// Leases, the queue and events, as tables; on a narrow screen each row becomes a card.

import { $, make } from "./dom.js";
import { bytes, duration, figures, moment, percent, short } from "./format.js";
import { badge, isOut } from "./gpus.js";
import { t } from "./language.js";
import { keep, part, say, setAttribute, setText } from "./nodes.js";
import { reason } from "./reasons.js";
import { colourOf } from "./tenants.js";

const KINDS = {
  joined: "eventJoined",
  left: "eventLeft",
  draining: "eventDraining",
  undrained: "eventUndrained",
  queued: "eventQueued",
  placed: "eventPlaced",
  moving: "eventMoving",
  moved: "eventMoved",
  "not moved": "eventNotMoved",
  suspended: "eventSuspended",
  released: "eventReleased",
  expired: "eventExpired",
  lost: "eventLost",
};
const TROUBLE = ["left", "not moved", "expired", "lost"]; // the server's sentence says why
const ACTIVE = 5; // seconds without a word from a client that mean nothing
const LEASE_STATES = ["placed", "moving", "suspended", "swapping out", "swapped out", "swapping in"];

/** A table whose columns are {name: of its heading's string, fill(cell, item), value(item) to sort by}. */
class Table {
  constructor(parent, columns, caption) {
    this.parent = parent;
    this.columns = columns;
    this.caption = caption;
    this.sorted = null; // {column, down}
    this.table = parent.appendChild(make("table"));
    // The roles are said once more: some browsers forget them where the style makes cards of rows.
    this.table.setAttribute("role", "table");
    this.table.append(make("caption", "hidden"));
    const head = this.table.appendChild(make("thead"));
    head.setAttribute("role", "rowgroup");
    const row = head.appendChild(make("tr"));
    row.setAttribute("role", "row");
    this.headings = columns.map((column) => {
      const heading = row.appendChild(make("th", column.name));
      heading.scope = "col";
      heading.setAttribute("role", "columnheader");
      if (column.value) heading.appendChild(make("button", "sort")).addEventListener("click", () => this.sort(column));
      return heading;
    });
    this.body = this.table.appendChild(make("tbody"));
    this.body.setAttribute("role", "rowgroup");
    this.nothing = parent.appendChild(make("p", "nothing"));
    this.items = [];
  }

  sort(column) {
    const down = this.sorted?.column === column ? !this.sorted.down : true;
    this.sorted = { column, down };
    this.show(this.items, this.empty, this.keyOf);
  }

  /** `empty` is said where there are no items. */
  show(items, empty, keyOf) {
    Object.assign(this, { items, empty, keyOf });
    setText(this.table.caption, t(this.caption));
    this.columns.forEach((column, at) => {
      const heading = this.headings[at];
      const place = heading.querySelector("button") ?? heading;
      setText(place, t(column.name));
      if (!column.value) return;
      place.title = t("sortBy", { name: t(column.name) });
      const now = this.sorted?.column === column ? (this.sorted.down ? "descending" : "ascending") : "none";
      setAttribute(heading, "aria-sort", now);
    });
    keep(this.body, this.inOrder(items), keyOf, () => this.create(), (row, item, index) => {
      this.columns.forEach((column, at) => {
        setAttribute(row.children[at], "data-label", t(column.name));
        column.fill(row.children[at], item, index);
      });
    });
    this.table.hidden = !items.length;
    setText(this.nothing, empty);
    this.nothing.hidden = items.length > 0;
  }

  inOrder(items) {
    if (!this.sorted) return items;
    const { column, down } = this.sorted;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    const ordered = [...items].sort((a, b) => compare(column.value(a), column.value(b)));
    return down ? ordered.reverse() : ordered;
  }

  create() {
    const row = make("tr");
    row.setAttribute("role", "row");
    for (const column of this.columns) row.appendChild(make("td", column.name)).setAttribute("role", "cell");
    return row;
  }
}

function tenant(cell, { tenant, lease, id }) {
  const dot = part(cell, "dot", "i");
  dot.className = `dot ${tenant === null ? "" : colourOf(tenant)}`;
  dot.hidden = tenant === null;
  say(cell, "who", tenant ?? "", "bdi");
  const name = lease ?? id ?? "";
  say(cell, "id", short(name), "code").title = name;
}

function gpu(cell, { gpu, target }) {
  say(cell, "gpu-name", gpu ?? "–");
  say(cell, "to", target ? ` → ${target}` : "");
}

function memory(cell, { memory, memory_used: used }) {
  const known = Number.isFinite(used);
  say(cell, "words", known ? t("quotaOf", { used: bytes(used), memory: bytes(memory) }) : bytes(memory));
  const bar = part(cell, "mini");
  bar.hidden = !known;
  bar.setAttribute("aria-hidden", "true");
  part(bar, "fill").style.width = `${known ? Math.min(100, (100 * used) / memory) : 0}%`;
}

function reasonOf(lease) {
  if (!isOut(lease) || !lease.residency.why) return reason(lease.reason);
  const { waits } = lease.residency;
  const why = reason(lease.residency.why);
  return Number.isFinite(waits) ? t("waitsFor", { why }) : why;
}

const stateOf = (lease) => (isOut(lease) ? lease.residency.state : lease.state);

const LEASE_COLUMNS = [
  { name: "tenant", fill: tenant, value: (lease) => lease.tenant },
  { name: "gpu", fill: gpu, value: (lease) => lease.gpu ?? "" },
  { name: "memory", fill: memory, value: (lease) => lease.memory_used ?? 0 },
  { name: "share", fill: (cell, { share }) => setText(cell, percent(share)), value: (lease) => lease.share },
  { name: "priority", fill: (cell, { priority }) => setText(cell, String(priority)), value: (lease) => lease.priority },
  {
    name: "state",
    fill: (cell, lease) => {
      const state = stateOf(lease);
      badge(cell, state, LEASE_STATES.includes(state) ? t(state) : state);
    },
    value: stateOf,
  },
  { name: "since", fill: (cell, lease) => setText(cell, duration(lease.age)), value: (lease) => lease.age },
  { name: "idle", fill: (cell, { idle }) => setText(cell, idle < ACTIVE ? t("active") : duration(idle)), value: (lease) => lease.idle },
  { name: "reason", fill: (cell, lease) => setText(cell, reasonOf(lease)) },
];

const QUEUE_COLUMNS = [
  { name: "position", fill: (cell, item) => setText(cell, String(item.place)) },
  { name: "tenant", fill: tenant },
  { name: "memory", fill: (cell, item) => setText(cell, bytes(item.memory)) },
  { name: "share", fill: (cell, { share }) => setText(cell, percent(share)) },
  { name: "priority", fill: (cell, { priority }) => setText(cell, String(priority)) },
  { name: "waited", fill: (cell, { waited }) => setText(cell, duration(waited)) },
  { name: "reason", fill: (cell, { why }) => setText(cell, reason(why)) },
];

const EVENT_COLUMNS = [
  { name: "time", fill: (cell, { time, now }) => setText(cell, moment(time, now)) },
  { name: "event", fill: (cell, { kind }) => badge(cell, kind, KINDS[kind] ? t(KINDS[kind]) : kind) },
  { name: "tenant", fill: tenant },
  {
    name: "where",
    fill: (cell, { source, target, kind, text }) => {
      say(cell, "words", source && target ? `${source} → ${target}` : (source ?? target ?? ""));
      say(cell, "why", TROUBLE.includes(kind) || !KINDS[kind] ? reason(text) : "");
    },
  },
  { name: "numbers", fill: (cell, event) => setText(cell, figures(event)) },
];

const SHOWN = 25; // events at first

export class TablesView {
  constructor() {
    this.leases = new Table($("leases"), LEASE_COLUMNS, "leases");
    this.queue = new Table($("queue"), QUEUE_COLUMNS, "queue");
    this.events = new Table($("events"), EVENT_COLUMNS, "events");
    this.shown = SHOWN;
  }

  more() {
    this.shown += 4 * SHOWN;
  }

  /** Shows what has `words` in a name. */
  show(status, words) {
    const wanted = words.trim().toLowerCase();
    const found = (item) =>
      !wanted ||
      [item.tenant, item.id, item.lease, item.gpu, item.target, item.source].some((name) =>
        name?.toLowerCase().includes(wanted),
      );
    const empty = (all, sentence) => t(all.length ? "nothingFound" : sentence);
    const count = (id, some, all) => {
      setText($(id), all.length === some.length ? String(all.length) : t("shownOf", { n: some.length, of: all.length }));
    };

    const held = status.leases.filter(({ state }) => state !== "queued");
    const leases = held.filter(found).map((lease) => ({ ...lease, age: Math.max(0, status.now - lease.since) }));
    this.leases.show(leases, empty(held, "noLeases"), ({ id }) => id);
    count("leases-count", leases, held);

    const queue = status.queue.map((item, at) => ({ ...item, place: at + 1 })).filter(found);
    this.queue.show(queue, empty(status.queue, "noQueue"), ({ id }) => id);
    count("queue-count", queue, status.queue);

    const events = status.events.filter(found);
    const latest = events.slice(-this.shown).reverse().map((event) => ({ ...event, now: status.now }));
    const oldest = events.length - latest.length;
    this.events.show(latest, empty(status.events, "noEvents"), ({ time, kind, lease, source, target }) =>
      JSON.stringify([time, kind, lease, source, target]),
    );
    count("events-count", latest, status.events);
    $("more").hidden = oldest === 0;
  }
}
