// How the GPUs were over the last hour: what the server remembers, and what the page has seen since.

const KEPT = 3600; // seconds

export class Samples {
  constructor() {
    this.seconds = 5;
    this.list = []; // {time, gpus: {name: [reserved, in use or null, utilisation or null]}}, the oldest first
    this.moves = new Map();
  }

  /** Takes in what the server remembers; it may overlap with what is here. */
  backfill({ seconds, samples, moves }) {
    this.seconds = seconds;
    const live = this.list.filter(({ time }) => !samples.length || time > samples.at(-1).time);
    this.list = [...samples, ...live];
    for (const move of moves) this.addMove(move);
  }

  add(status) {
    const now = status.now;
    const last = this.list.at(-1);
    if (last && now < last.time) {
      this.list = []; // another clock
      this.moves.clear();
    }
    if (!last || now >= last.time + this.seconds) {
      const gpus = Object.fromEntries(
        status.gpus.map((gpu) => [gpu.name, [gpu.used, gpu.measured_memory, gpu.utilization]]),
      );
      this.list.push({ time: now, gpus });
    }
    const known = this.moves.size;
    for (const event of status.events) if (event.kind === "moved") this.addMove(event);
    this.list = this.list.filter(({ time }) => time >= now - KEPT);
    for (const [id, { time }] of this.moves) if (time < now - KEPT) this.moves.delete(id);
    return this.moves.size > known;
  }

  addMove(event) {
    this.moves.set(JSON.stringify([event.time, event.lease, event.source, event.target]), event);
  }

  /** [time, value] of a GPU from a moment on; `which` is 0 reserved, 1 in use, 2 utilisation. */
  points(gpu, which, from) {
    return this.list
      .filter(({ time, gpus }) => time >= from && gpus[gpu])
      .map(({ time, gpus }) => [time, gpus[gpu][which]]);
  }

  /** The values of a GPU nearest to a moment, or null where there is a gap. */
  at(gpu, time) {
    let best = null;
    for (const sample of this.list) {
      if (best === null || Math.abs(sample.time - time) < Math.abs(best.time - time)) best = sample;
    }
    if (!best || Math.abs(best.time - time) > 2 * this.seconds || !best.gpus[gpu]) return null;
    return { time: best.time, values: best.gpus[gpu] };
  }

  /** The moves to or from a GPU; all of them without one. */
  movesOf(gpu) {
    return [...this.moves.values()].filter(({ source, target }) => !gpu || source === gpu || target === gpu);
  }
}
