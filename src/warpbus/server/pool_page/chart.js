// A line over time, with a cursor that all charts share, and marks on it. Knows nothing of GPUs.

import { make } from "./dom.js";
import { clock } from "./format.js";
import { keep, setAttribute, setText } from "./nodes.js";

const SPACE = "http://www.w3.org/2000/svg";
const TOP = 6;
const PLOT = 78; // px, of the plot
const FOOT = 18; // px, of the times below it
const NEAR = 14; // px
const TICKS = { 600: 120, 1800: 300, 3600: 900 }; // seconds between times, by the seconds shown

function draw(tag, className, parent) {
  const node = document.createElementNS(SPACE, tag);
  node.setAttribute("class", className);
  return parent.appendChild(node);
}

export class Chart {
  /** `moveCursor(time or null)` is called when the pointer or a key moves it; `create` makes a mark's element. */
  constructor(title, moveCursor, createMark) {
    this.moveCursor = moveCursor;
    this.createMark = createMark;
    this.node = make("figure", "chart");
    this.caption = this.node.appendChild(make("figcaption"));
    this.title = this.caption.appendChild(make("span", "name", title));
    this.reading = this.caption.appendChild(make("span", "reading"));
    this.plot = this.node.appendChild(make("div", "plot"));
    this.svg = draw("svg", "", this.plot);
    setAttribute(this.svg, "role", "slider");
    setAttribute(this.svg, "tabindex", "0");
    this.grid = draw("g", "grid", this.svg);
    this.areaPath = draw("path", "area", this.svg);
    this.linePath = draw("path", "line", this.svg);
    this.limitPath = draw("path", "reserved", this.svg);
    this.times = draw("g", "times", this.svg);
    this.cursorLine = draw("line", "cursor", this.svg);
    this.marks = this.plot.appendChild(make("div", "marks"));
    this.width = 0;
    this.data = null;
    this.cursor = null;
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.draw();
    }).observe(this.plot);
    this.svg.addEventListener("pointermove", (event) => this.moveCursor(this.timeAt(event)));
    this.svg.addEventListener("pointerdown", (event) => this.moveCursor(this.timeAt(event)));
    this.svg.addEventListener("pointerleave", () => this.moveCursor(null));
    this.svg.addEventListener("blur", () => this.moveCursor(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /**
   * `data`: {label, from, to, step, top, scale, line, reserved, read, sentence, marks, fillMark}. `line` and `reserved`
   * are [time, value or null], `step` the usual seconds between them, `top` the value at the top and `scale` its name,
   * `read(time)` says what was then and `sentence(time, that)` says it in full. Marks have {time, key};
   * `fillMark(node, marks)` brings up to date the element of those that lie together.
   */
  show(data) {
    this.data = data;
    this.draw();
  }

  setCursor(time) {
    this.cursor = time;
    this.drawCursor();
  }

  draw() {
    const { data, width } = this;
    if (!data || !width) return;
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${TOP + PLOT + FOOT}`);
    setAttribute(this.svg, "aria-label", data.label);
    const runs = data.line ? runsOf(data.line, 3 * data.step) : [];
    const base = this.y(0);
    const lines = runs.map((run) => this.path(run));
    setAttribute(this.linePath, "d", lines.join(""));
    const closed = runs.map((run, at) => `${lines[at]}V${base}H${this.x(run[0][0])}Z`);
    setAttribute(this.areaPath, "d", closed.join(""));
    const limits = data.reserved ? runsOf(data.reserved, 3 * data.step) : [];
    setAttribute(this.limitPath, "d", limits.map((run) => this.steps(run)).join(""));
    this.drawGrid();
    keep(this.marks, this.groups(data.marks), ([{ key }]) => key, this.createMark, (node, marks) => {
      node.style.left = `${this.x(marks[0].time)}px`;
      data.fillMark(node, marks);
    });
    this.drawCursor();
  }

  /** Marks that would lie on one another are one. */
  groups(marks) {
    const groups = [];
    for (const mark of [...marks].sort((a, b) => a.time - b.time)) {
      const first = groups.at(-1)?.[0];
      if (first && this.x(mark.time) - this.x(first.time) < NEAR) groups.at(-1).push(mark);
      else groups.push([mark]);
    }
    return groups;
  }

  drawGrid() {
    const { data, width } = this;
    this.grid.replaceChildren();
    for (const part of [0, 0.5, 1]) {
      const line = draw("line", part ? "" : "base", this.grid);
      const y = Math.round(this.y(part * data.top)) + 0.5;
      for (const [name, value] of Object.entries({ x1: 0, x2: width, y1: y, y2: y })) setAttribute(line, name, value);
    }
    const scale = draw("text", "scale", this.grid);
    setAttribute(scale, "x", 2);
    setAttribute(scale, "y", TOP + 12);
    setText(scale, data.scale);
    this.times.replaceChildren();
    const wide = data.to - data.from;
    const tick = TICKS[wide] * (width < 260 ? 2 : 1);
    for (let time = Math.ceil(data.from / tick) * tick; time <= data.to; time += tick) {
      const x = this.x(time);
      if (x < 16 || x > width - 16) continue;
      const text = draw("text", "", this.times);
      setAttribute(text, "x", x);
      setAttribute(text, "y", TOP + PLOT + 14);
      setText(text, clock(time, false));
    }
  }

  drawCursor() {
    const { data, cursor } = this;
    if (!data) return;
    const time = cursor === null ? null : Math.min(Math.max(cursor, data.from), data.to);
    this.cursorLine.style.display = time === null ? "none" : "";
    if (time !== null) {
      const x = this.x(time);
      for (const [name, value] of Object.entries({ x1: x, x2: x, y1: TOP, y2: TOP + PLOT })) {
        setAttribute(this.cursorLine, name, value);
      }
    }
    const said = data.read(time);
    setText(this.reading, said);
    setAttribute(this.svg, "aria-valuemin", String(Math.round(data.from - data.to)));
    setAttribute(this.svg, "aria-valuemax", "0");
    setAttribute(this.svg, "aria-valuenow", String(Math.round((time ?? data.to) - data.to)));
    setAttribute(this.svg, "aria-valuetext", data.sentence(time ?? data.to, said));
  }

  x(time) {
    const { from, to } = this.data;
    return Math.round((10 * (time - from) * this.width) / (to - from)) / 10;
  }

  y(value) {
    const part = Math.min(1, Math.max(0, value / this.data.top));
    return Math.round(10 * (TOP + (1 - part) * PLOT)) / 10;
  }

  path(run) {
    return run.map(([time, value], at) => `${at ? "L" : "M"}${this.x(time)},${this.y(value)}`).join("");
  }

  /** What is reserved changes at once. */
  steps(run) {
    return run.map(([time, value], at) => (at ? `H${this.x(time)}V${this.y(value)}` : `M${this.x(time)},${this.y(value)}`)).join("");
  }

  timeAt(event) {
    const box = this.svg.getBoundingClientRect();
    const { from, to } = this.data;
    return from + ((event.clientX - box.left) / box.width) * (to - from);
  }

  key(event) {
    const { from, to, step } = this.data;
    const now = this.cursor ?? to;
    const wanted = {
      ArrowLeft: now - step,
      ArrowDown: now - step,
      ArrowRight: now + step,
      ArrowUp: now + step,
      PageUp: now + 12 * step,
      PageDown: now - 12 * step,
      Home: from,
      End: to,
    }[event.key];
    if (event.key === "Escape") this.moveCursor(null);
    if (wanted === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.moveCursor(Math.min(Math.max(wanted, from), to));
  }
}

/** Points that follow one another without a gap; a value of null is one. */
function runsOf(points, gap) {
  const runs = [];
  let last = -Infinity;
  for (const [time, value] of points) {
    if (!Number.isFinite(value)) {
      last = -Infinity;
      continue;
    }
    if (time - last > gap) runs.push([]);
    runs.at(-1).push([time, value]);
    last = time;
  }
  return runs;
}
