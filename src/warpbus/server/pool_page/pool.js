// The page: asks for the pool's status again and again, and shows it. It changes nothing.

import { $, announce, make } from "./dom.js";
import { bytes, duration, percent } from "./format.js";
import { GpusView, hideTip, movedSentence } from "./gpus.js";
import { number, setLanguage, speak, t, translate } from "./language.js";
import { keep, say, setAttribute, setText } from "./nodes.js";
import { preferences } from "./preferences.js";
import { request } from "./request.js";
import { Samples } from "./samples.js";
import { TABLES } from "./strings.js";
import { TablesView } from "./tables.js";
import { meet } from "./tenants.js";

const EVERY = 400; // ms for each second between the server's samples, which are 5 s apart: 2 s
const RETRY = 1000; // the same, while there is no answer
const THEMES = ["auto", "light", "dark"];
const RANGES = [600, 1800, 3600]; // seconds

speak(TABLES);
preferences.load();
const samples = new Samples();
const gpus = new GpusView(samples);
const tables = new TablesView();
let status = null;
let heard = 0; // when, by this browser's clock
let backfilled = false;
let problem = null; // the ApiError of the last request
let timer = 0;
let asking = false;

// Asking

async function ask() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  try {
    if (!backfilled) {
      samples.backfill(await (await request("api/history", preferences.key)).json());
      backfilled = true;
    }
    const found = await (await request("api/status", preferences.key)).json();
    tell(status, found);
    status = found;
    samples.add(status);
    heard = Date.now();
    problem = null;
  } catch (error) {
    if (error.kind === "unauthorized" && problem?.kind !== "unauthorized") openKey(error);
    problem = error;
    backfilled = false; // what happens meanwhile is in the server's history
  } finally {
    asking = false;
  }
  show();
  if (!document.hidden && problem?.kind !== "unauthorized") timer = setTimeout(ask, samples.seconds * (problem ? RETRY : EVERY));
}

/** Says to a screen reader what changed since the last status: moves, and GPUs that were lost. */
function tell(before, after) {
  if (!before) return;
  const last = before.events.at(-1)?.time ?? -Infinity;
  const moved = after.events.filter(({ kind, time }) => kind === "moved" && time > last);
  const states = new Map(before.gpus.map(({ name, state }) => [name, state]));
  const lost = after.gpus.filter(({ name, state }) => state === "lost" && states.get(name) && states.get(name) !== "lost");
  const said = [
    ...moved.map(movedSentence),
    ...lost.map(({ name }) => t("lostSay", { gpu: name })),
  ];
  if (said.length) announce(said.join(" "));
}

// Showing

function show() {
  showNotice();
  showLive();
  if (!status) return;
  meet(status.leases);
  showSummary();
  gpus.show(status, preferences.get("range"));
  $("gpus").classList.toggle("empty", !status.gpus.length);
  say($("gpus-title").closest("section"), "nothing", status.gpus.length ? "" : t("noGpus"), "p");
  tables.show(status, $("filter").value);
}

function showLive() {
  const stale = status && problem;
  const age = Math.max(1, Math.round((Date.now() - heard) / 1000));
  $("live").className = `live ${problem ? "off" : status ? "on" : ""}`;
  setText($("live-text"), stale ? t("asOf", { n: duration(age) }) : t(status ? "live" : "connecting"));
  document.body.classList.toggle("stale", Boolean(stale));
}

function showNotice() {
  const kind = problem?.kind;
  const sentence = !problem
    ? ""
    : kind === "unauthorized"
      ? t(preferences.key ? "unauthorizedKey" : "unauthorized")
      : t(kind === "away" || kind === "restarting" ? kind : "failed", { message: problem.message });
  const shown = $("notice");
  if (shown.dataset.said === sentence) return;
  shown.dataset.said = sentence;
  shown.replaceChildren();
  if (!sentence) return;
  const node = shown.appendChild(make("div", kind === "unauthorized" ? "notice" : "notice waiting"));
  node.append(make("p", "", sentence));
  if (kind === "unauthorized") {
    const button = node.appendChild(make("button", "quiet", t("enterKey")));
    button.type = "button";
    button.addEventListener("click", () => openKey(problem));
  }
}

function showSummary() {
  const open = status.gpus.filter(({ state }) => state === "open");
  const there = status.gpus.filter(({ state }) => state !== "lost");
  const sum = (list, name) => list.reduce((total, each) => total + (each[name] ?? 0), 0);
  const [reserved, used] = ["used", "measured_memory"].map((name) => sum(there, name));
  const memory = there.reduce((total, gpu) => total + (gpu.promised ?? gpu.memory), 0);
  const physical = sum(there, "memory");
  const share = there.length ? there.reduce((total, gpu) => total + gpu.share_used / (gpu.oversubscribe ?? 1), 0) / there.length : 0;
  const moves = samples.movesOf(null);
  const longest = Math.max(...moves.map(({ pause }) => pause ?? -Infinity));
  const held = status.leases.filter(({ state }) => state !== "queued");
  const measured = there.some(({ measured_memory: each }) => Number.isFinite(each));
  const tiles = [
    ["openGpus", t("ofAll", { n: open.length, of: status.gpus.length }), ""],
    ["memoryReserved", percent(memory ? reserved / memory : 0), t("quotaOf", { used: bytes(reserved), memory: bytes(memory) })],
    ["memoryUsed", measured ? percent(physical ? used / physical : 0) : "–", measured ? bytes(used) : t("notMeasured")],
    ["computeShared", percent(share), ""],
    ["leasesHeld", number(held.length), ""],
    ["waiting", number(status.queue.length), ""],
    ["migrations", number(moves.length), longest >= 0 ? t("longestPause", { n: duration(longest) }) : ""],
  ];
  keep($("summary"), tiles, ([name]) => name, () => make("div"), (node, [name, value, more]) => {
    say(node, "name", t(name), "dt");
    say(node, "value", value, "dd");
    say(node, "more", more, "dd");
  });
}

function applyAppearance() {
  const theme = preferences.get("theme");
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setLanguage(preferences.get("language"));
  translate(document);
  document.title = `${t("title")} - Warpbus`;
  setText($("language"), t("language"));
  $("language").setAttribute("aria-label", t("languageLabel"));
  const name = t({ auto: "themeAuto", light: "themeLight", dark: "themeDark" }[theme]);
  $("theme").title = t("themeNow", { name });
  $("theme").setAttribute("aria-label", $("theme").title);
  showRanges();
  show();
}

function showRanges() {
  const chosen = preferences.get("range");
  keep($("ranges"), RANGES, (seconds) => seconds, createRange, (node, seconds) => {
    setText(node, seconds === 3600 ? t("rangeHour") : t("rangeMinutes", { n: seconds / 60 }));
    setAttribute(node, "aria-checked", String(seconds === chosen));
    node.tabIndex = seconds === chosen ? 0 : -1;
  });
}

function createRange(seconds) {
  const node = make("button", "range");
  node.type = "button";
  node.setAttribute("role", "radio");
  node.addEventListener("click", () => choose(seconds));
  node.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const at = (RANGES.indexOf(seconds) + way + RANGES.length) % RANGES.length;
    choose(RANGES[at]);
    $("ranges").children[at].focus();
  });
  return node;
}

function choose(seconds) {
  preferences.set("range", seconds);
  gpus.moveCursor(null);
  showRanges();
  show();
}

// The key

function openKey(error) {
  const sentence = error ? t(preferences.key ? "unauthorizedKey" : "unauthorized") : "";
  setText($("key-problem"), sentence);
  $("key-problem").hidden = !sentence;
  $("key").value = preferences.key;
  $("key-open").hidden = false;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

$("key-open").addEventListener("click", () => openKey(null));
$("key-close").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", () => {
  preferences.saveKey($("key").value.trim(), $("remember").checked);
  problem = null;
  ask();
});

// The rest

$("theme").addEventListener("click", () => {
  preferences.set("theme", THEMES[(THEMES.indexOf(preferences.get("theme")) + 1) % THEMES.length]);
  applyAppearance();
});
$("language").addEventListener("click", () => {
  preferences.set("language", document.documentElement.lang === "en" ? "zh" : "en");
  applyAppearance();
});
$("filter").addEventListener("input", show);
$("filter").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  $("filter").value = "";
  show();
});
$("more").addEventListener("click", () => {
  tables.more();
  show();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.tagName === "INPUT") return;
  event.preventDefault();
  $("filter").focus();
});
addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else {
    backfilled = false;
    ask();
  }
});

applyAppearance();
ask();
