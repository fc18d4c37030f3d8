// Numbers as people read them.

import { number, t } from "./language.js";

const BYTES = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Three digits and a unit: 18.4 GB. Decimal units, as quotas are given. */
export function bytes(value) {
  let unit = 0;
  while (value >= 999.5 && unit < BYTES.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value, unit === 0 || value >= 99.95 ? 0 : 1)} ${BYTES[unit]}`;
}

const unit = (value, name, digits = 0) =>
  value
    .toLocaleString(document.documentElement.lang, {
      style: "unit",
      unit: name,
      unitDisplay: "short",
      maximumFractionDigits: digits,
    })
    .replace(/(\d)(?=\p{Script=Han})/u, "$1 "); // as the page's Chinese texts write it: 15 秒

/** Seconds by their size: 18 ms, 2.4 s, 3 min 5 s, 12 min, 2 h 4 min, 3 d 1 h. */
export function duration(seconds) {
  if (seconds < 0.9995) return unit(1000 * seconds, "millisecond", seconds < 0.00995 ? 1 : 0);
  if (seconds < 9.95) return unit(seconds, "second", 1);
  const whole = Math.round(seconds);
  const parts = [
    [Math.floor(whole / 86400), "day"],
    [Math.floor(whole / 3600) % 24, "hour"],
    [Math.floor(whole / 60) % 60, "minute"],
    [whole % 60, "second"],
  ];
  const first = parts.findIndex(([value]) => value > 0);
  return parts
    .slice(first, first + (parts[first][0] < 10 ? 2 : 1))
    .filter(([value]) => value > 0)
    .map(([value, name]) => unit(value, name))
    .join(" ");
}

export const percent = (part) => `${number(100 * part)} %`;

/** A moment (seconds since the epoch) as the clock on the wall shows it. */
export function clock(time, seconds = true) {
  return new Date(1000 * time).toLocaleTimeString(document.documentElement.lang, {
    hour: "2-digit",
    minute: "2-digit",
    second: seconds ? "2-digit" : undefined,
    hourCycle: "h23",
  });
}

/** The same, with the day where it was another one than that of `now`. */
export function moment(time, now) {
  const [day, today] = [time, now].map((each) => new Date(1000 * each));
  if (day.toDateString() === today.toDateString()) return clock(time);
  const said = day.toLocaleDateString(document.documentElement.lang, { month: "short", day: "numeric" });
  return `${said} ${clock(time)}`;
}

/** The first digits of a lease's id, which tell leases apart. */
export const short = (id) => id.slice(0, 8);

/** How long an event took, and what it copied, in words. */
export function figures(event) {
  const found = [];
  const took = { placed: "waitedFor", moved: "tookTime", "not moved": "tookTime" }[event.kind] ?? "livedFor";
  if (Number.isFinite(event.pause)) found.push(t("pausedFor", { n: duration(event.pause) }));
  if (Number.isFinite(event.seconds)) found.push(t(took, { n: duration(event.seconds) }));
  if (Number.isFinite(event.bytes)) found.push(t("copied", { n: bytes(event.bytes) }));
  return found.join(" · ");
}
