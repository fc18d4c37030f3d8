// The GPUs: how much of each is leased and used, now and over time.

import { Chart } from "./chart.js";
import { $, icon, make } from "./dom.js";
import { bytes, clock, figures, percent, short } from "./format.js";
import { t } from "./language.js";
import { keep, part, say, setAttribute, setText } from "./nodes.js";
import { colourOf } from "./tenants.js";

const LISTED = 4; // migrations in a tooltip
const STATES = ["open", "draining", "lost"];

/** A word with an icon, so that the colour is not all that distinguishes it. */
export function badge(parent, state, words) {
  const node = part(parent, "badge");
  if (node.dataset.state !== state) {
    node.dataset.state = state;
    node.replaceChildren(...(STATES.includes(state) ? [icon(state)] : []), make("span", "word"));
  }
  setText(node.lastElementChild, words);
  return node;
}

/** Its memory is in the host's. */
export const isOut = (lease) => lease.state === "placed" && (lease.residency?.state ?? "resident") !== "resident";

export class GpusView {
  constructor(samples) {
    this.samples = samples;
    this.cursor = null;
    this.charts = new Set();
  }

  /** `range` is in seconds. */
  show(status, range) {
    const leases = new Map(status.leases.map((lease) => [lease.id, lease]));
    const create = () => this.create();
    if (!status.gpus.length) this.charts.clear();
    this.now = status.now;
    keep($("gpus"), status.gpus, ({ name }) => name, create, (node, gpu) => {
      this.fillFacts(node, gpu, gpu.leases.map((id) => leases.get(id)).filter(Boolean));
      this.fillCharts(node, gpu, status, range);
    });
    for (const chart of this.charts) if (!chart.node.isConnected) this.charts.delete(chart);
  }

  create() {
    const node = make("article", "card");
    const facts = node.appendChild(make("div", "facts"));
    const head = facts.appendChild(make("div", "gpu-head"));
    head.append(make("h3"));
    facts.append(make("p", "model"));
    for (const name of ["memory", "compute"]) {
      const row = facts.appendChild(make("div", `row ${name}`));
      row.append(make("span", "name"), make("span", "free"));
      const bar = row.appendChild(make("div", "bar"));
      bar.setAttribute("role", "img");
    }
    const charts = node.appendChild(make("div", "charts"));
    node.charts = ["memory", "utilization"].map((name) => {
      const chart = new Chart(t(name), (time) => this.moveCursor(time), createMark);
      this.charts.add(chart);
      charts.append(chart.node);
      return chart;
    });
    return node;
  }

  moveCursor(time) {
    this.cursor = time;
    for (const chart of this.charts) chart.setCursor(time);
  }

  fillFacts(node, gpu, leases) {
    const facts = part(node, "facts");
    const title = part(facts, "gpu-head").querySelector("h3");
    setText(title, gpu.name);
    badge(part(facts, "gpu-head"), gpu.state, t(gpu.state));
    node.className = `card ${gpu.state}`;
    setAttribute(node, "aria-label", `${t("gpu")} ${gpu.name}`);
    setText(part(facts, "model"), gpu.model);
    const known = Number.isFinite(gpu.measured_memory);
    const times = gpu.oversubscribe ?? 1;
    const values = {
      gpu: gpu.name,
      used: known ? bytes(gpu.measured_memory) : "",
      reserved: bytes(gpu.used),
      free: bytes(gpu.free),
      memory: bytes(promised(gpu)),
      n: percent(gpu.share_used),
      times,
      resident: bytes(gpu.resident ?? 0),
      swapped: bytes(gpu.swapped ?? 0),
    };
    const swaps = part(facts, "swaps", "p");
    swaps.hidden = times <= 1;
    setText(swaps, times > 1 ? t("oversubscribed", { ...values, memory: bytes(gpu.memory) }) : "");
    const [memory, compute] = facts.querySelectorAll(".row");
    say(memory, "name", t("memory"));
    say(memory, "free", t("freeOf", values));
    setAttribute(part(memory, "bar"), "aria-label", t(known ? "memoryBar" : "memoryBarUnknown", values));
    fillBar(part(memory, "bar"), gpu, leases, (lease) => [lease.memory / promised(gpu), lease.memory_used / lease.memory]);
    say(compute, "name", t("share"));
    say(compute, "free", t("shareNow", values));
    setAttribute(part(compute, "bar"), "aria-label", t("shareBar", values));
    fillBar(part(compute, "bar"), gpu, leases, (lease) => [lease.share / times, 1]);
  }

  fillCharts(node, gpu, status, range) {
    const [memory, utilization] = node.charts;
    const to = status.now;
    const from = to - range;
    const early = from - 2 * this.samples.seconds;
    const common = { from, to, step: this.samples.seconds, sentence: (time, reading) => t("chartAt", { time: clock(time), reading }) };
    const points = (which, current) => {
      const found = this.samples.points(gpu.name, which, early);
      return gpu.state === "lost" ? found : [...found, [to, current]];
    };
    const used = points(1, gpu.measured_memory);
    const marks = this.samples
      .movesOf(gpu.name)
      .filter(({ time }) => time >= from)
      .map((move) => ({ time: move.time, key: JSON.stringify([move.time, move.lease]), move }));
    const fillMark = (mark, marks) => {
      mark.moves = marks.map(({ move }) => move);
      mark.classList.toggle("leaves", mark.moves.every(({ source }) => source === gpu.name));
      mark.classList.toggle("several", mark.moves.length > 1);
      setAttribute(mark, "aria-label", mark.moves.map((move) => `${clock(move.time)}: ${movedSentence(move)}`).join("; "));
    };
    setText(memory.title, t("memory"));
    memory.show({
      ...common,
      label: t("chartMemory", { gpu: gpu.name }),
      top: promised(gpu),
      scale: bytes(promised(gpu)),
      line: used,
      reserved: points(0, gpu.used),
      read: (time) => this.read(gpu, time, ([reserved, measured]) => {
        const values = { reserved: bytes(reserved), used: Number.isFinite(measured) ? bytes(measured) : "" };
        return t(values.used ? "memoryNow" : "memoryUnknown", values);
      }),
      marks,
      fillMark,
    });
    setText(utilization.title, t("utilization"));
    utilization.show({
      ...common,
      label: t("chartUtilization", { gpu: gpu.name }),
      top: 1,
      scale: percent(1),
      line: points(2, gpu.utilization),
      reserved: null,
      read: (time) => this.read(gpu, time, (values) => (Number.isFinite(values[2]) ? percent(values[2]) : t("notMeasured"))),
      marks: [],
    });
    memory.setCursor(this.cursor);
    utilization.setCursor(this.cursor);
  }

  /** What was at a moment, with the moment; without one, what is now. */
  read(gpu, time, say) {
    if (time === null) return gpu.state === "lost" ? "" : say([gpu.used, gpu.measured_memory, gpu.utilization]);
    if (this.now - time < this.samples.seconds / 2) return say([gpu.used, gpu.measured_memory, gpu.utilization]);
    const found = this.samples.at(gpu.name, time);
    return found ? `${clock(found.time)} · ${say(found.values)}` : t("nothingThen");
  }
}

/** The bytes that leases may have together: more than the GPU has where it is oversubscribed. */
const promised = (gpu) => gpu.promised ?? gpu.memory;

/** A piece for each lease: as wide as its part of what is promised, full as far as it is used. */
function fillBar(bar, gpu, leases, partsOf) {
  keep(bar, leases, ({ id }) => id, () => {
    const piece = make("span", "piece");
    piece.append(make("span", "fill"));
    return piece;
  }, (piece, lease) => {
    const [width, used] = partsOf(lease);
    const out = isOut(lease) ? "out" : "";
    const going = lease.state === "moving" ? (lease.target === gpu.name ? "arriving" : "leaving") : "";
    piece.className = `piece ${colourOf(lease.tenant)} ${going} ${out}`;
    piece.style.width = `${100 * Math.min(1, width)}%`;
    piece.title = `${lease.tenant} · ${short(lease.id)}`;
    piece.firstElementChild.style.width = `${100 * (Number.isFinite(used) ? Math.min(1, used) : 0)}%`;
  });
}

// Marks: where a lease came or went

function createMark() {
  const mark = make("button", "mark");
  mark.type = "button";
  mark.append(make("span"));
  const open = () => showTip(mark);
  for (const event of ["pointerenter", "focus", "click"]) mark.addEventListener(event, open);
  for (const event of ["pointerleave", "blur"]) mark.addEventListener(event, hideTip);
  mark.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  return mark;
}

export const movedSentence = (move) => t("movedSay", { ...move, figures: figures(move) });

function showTip(mark) {
  const tip = $("tip");
  const lines = mark.moves.slice(0, LISTED).flatMap((move) => {
    const head = make("p", "tip-head");
    head.append(make("i", `dot ${colourOf(move.tenant)}`), make("bdi", "", move.tenant), make("code", "", short(move.lease)));
    const said = [`${move.source} → ${move.target}`, figures(move), clock(move.time)];
    return [head, ...said.filter(Boolean).map((line) => make("p", "", line))];
  });
  if (mark.moves.length > LISTED) lines.push(make("p", "", t("andMore", { n: mark.moves.length - LISTED })));
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const box = mark.getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(room, box.left + box.width / 2 - tip.offsetWidth / 2))}px`;
  tip.style.top = `${box.top - tip.offsetHeight - 6 < 8 ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}
