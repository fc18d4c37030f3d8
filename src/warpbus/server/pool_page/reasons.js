// The broker's reasons, in the reader's language. A reason that is not listed is shown as it came.

import { t } from "./language.js";

// A part of a sentence that is a reason itself, such as what follows "waits: ", is said in the same way.
const REASONS = [
  [/^waits: (?<why>.+)$/, "whyQueued"],
  [/^near (?<gpu>\S+) \((?<how>.+?)\), (?<why>.+)$/, "whyNear"],
  [/^with NVLink$/, "nearLink"],
  [/^the GPU$/, "nearSame"],
  [/^on the host$/, "nearHost"],
  [/^requested on (?<gpu>.+?), (?<why>.+)$/, "whyRequested"],
  [/^the only GPU with room: (?<memory>.+) and share (?<share>[\d.]+) stay free$/, "whyOnly"],
  [/^best fit of (?<n>\d+) GPUs with room: (?<memory>.+) and share (?<share>[\d.]+) stay free$/, "whyBest"],
  [/^moves from (?<source>\S+) to (?<target>\S+)$/, "whyMoves"],
  [/^moved from (?<source>\S+)$/, "whyMoved"],
  [/^stayed on (?<gpu>\S+): (?<why>.+)$/, "whyStayed"],
  [/^has room on (?<gpu>\S+) and is placed next$/, "whyNext"],
  [/^waits for the lease that it is to be near to, (?<lease>\S+)$/, "whyNeighbour"],
  [/^(?<why>needs .+); (?<gpu>\S+) is kept for it$/, "whyKept"],
  [
    /^needs (?<memory>.+) and (?<share>\S+) of the GPU; most is free on (?<gpu>\S+) with (?<free>.+) and share (?<left>[\d.]+)$/,
    "whyNeeds",
  ],
  [/^(?<gpu>\S+) has room, but is kept for (?<lease>\S+)$/, "whyOther"],
  [/^it was idle, and another lease has work on (?<gpu>\S+)$/, "whyIdle"],
  [/^a lease of priority (?<n>-?\d+) has work on (?<gpu>\S+)$/, "whyPriority"],
  [/^its time slice on (?<gpu>\S+) is over, and another lease of its priority has work$/, "whySlice"],
  [/^room in host memory, which is full$/, "whyFull"],
];

/** A reason of the pool in the language of the page. */
export function reason(text) {
  for (const [pattern, key] of REASONS) {
    const found = pattern.exec(text);
    if (found) return t(key, Object.fromEntries(Object.entries(found.groups ?? {}).map(([name, part]) => [name, reason(part)])));
  }
  return text;
}
