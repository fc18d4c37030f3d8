// The page: what is shown, what is typed, and which part does what.

import { listModels } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { addVersion, asMarkdown, switchVersion, versionOf } from "./conversation.js";
import { $, download, make, toast } from "./dom.js";
import { HistoryView } from "./history.js";
import { number, setLanguage, speak, t, translate } from "./language.js";
import { MessagesView } from "./messages.js";
import { Notice } from "./notice.js";
import { ApiError } from "./request.js";
import { SettingsDialog } from "./settings.js";
import { showStarters } from "./starters.js";
import { newId, Store } from "./store.js";
import { TABLES } from "./strings.js";

const NEW = "new"; // the id under which the draft and the problem of a chat without messages are kept
const TITLE = 60; // characters of the first question
const THEMES = ["auto", "light", "dark"];
const narrow = matchMedia("(max-width: 820px)");
const touch = matchMedia("(hover: none) and (pointer: coarse)");

const store = new Store((key, values) => toast(t(key, values)));
const problems = new Map(); // id of a conversation -> the ApiError of its last answer
let current = null; // id of the conversation shown
let editing = null; // index of the question that the composer holds
let models = [];

const chat = new Chat(store, {
  grown(id) {
    if (id === current) messages.grow();
  },
  ended(id, error) {
    if (error) problems.set(id, error);
    if (id === current) {
      show({ keepPlace: true });
      if (!error) messages.announceAnswer();
      if (error?.kind === "unauthorized") openSettings();
    }
    // While a model loads, the server does not know yet how much it can read.
    if (!error && !limit()) loadModels();
    showHistory();
  },
});
const messages = new MessagesView({
  edit: beginEdit,
  regenerate: (at) => answer({ at }),
  continue: () => answer({ goOn: true }),
  change(index, to) {
    switchVersion(conversation(), index, to);
    problems.delete(current);
    if (editing !== null) endEdit();
    store.save(conversation());
    show({ keepPlace: true });
    messages.focusVersions(index);
  },
  results(results) {
    conversation().messages.push({ role: "tool", versions: [{ results }], current: 0 });
    store.save(conversation());
    answer();
  },
});
const attachments = new Attachments(() => showComposer());
const pending = new Map(); // id of a conversation -> the files of its draft
const notice = new Notice(() => store.key, {
  retry,
  settings: openSettings,
  fresh: () => open(null),
  back() {
    problems.delete(draftId());
    showNotice();
    toast(t("back"));
  },
});
const historyView = new HistoryView(store, {
  open,
  rename(id, title) {
    const renamed = store.conversations.get(id);
    renamed.title = title;
    store.save(renamed);
  },
  remove,
});
const settings = new SettingsDialog(store, {
  appearance: applyAppearance,
  async closed(keyChanged) {
    if (keyChanged) await retry();
    else $("question").focus();
  },
  data() {
    if (current && !conversation()) open(null);
    showHistory();
  },
  model: () => model(),
});

const conversation = () => store.conversations.get(current);
const draftId = () => current ?? NEW;
const model = () => models.find(({ id }) => id === $("model").value);
const limit = () => model()?.limit;

// What is shown

function show({ keepPlace = false } = {}) {
  messages.show(conversation(), chat.running(current), keepPlace);
  document.title = conversation() ? `${conversation().title} - Warpbus` : "Warpbus";
  showNotice();
  showComposer();
  showContext();
  // The button that was pressed may be gone; the keyboard goes on from the box.
  if (document.activeElement === document.body && !touch.matches) $("question").focus();
}

function showNotice() {
  const last = conversation()?.messages.at(-1);
  const again = !last || last.role !== "assistant";
  const error = problems.get(draftId()) ?? (last && again ? new ApiError("unanswered") : null);
  if (error && !chat.running(current)) notice.show(error, again);
  else notice.clear();
  messages.follow();
}

function showComposer() {
  const running = chat.running(current);
  const button = $("send");
  button.classList.toggle("running", running);
  button.querySelector("use").setAttribute("href", running ? "#i-stop" : "#i-send");
  button.setAttribute("aria-label", t(running ? "stop" : "send"));
  button.title = button.getAttribute("aria-label");
  button.disabled = !running && !$("question").value.trim() && !attachments.files.length;
  $("hint").textContent = t(editing === null ? "hint" : "editing");
  $("composer").classList.toggle("editing", editing !== null);
  $("export-open").hidden = !conversation();
  fit();
}

/** How much of what the model can read is used, as the server counted it last. */
function showContext() {
  const last = conversation()?.messages.at(-1);
  const stats = last && versionOf(last).stats;
  const most = limit();
  const used = stats?.prompt === null || !stats ? null : stats.prompt + (stats.completion ?? 0);
  const node = $("context");
  node.textContent = "";
  if (used === null || !most) return;
  const percent = Math.min(100, Math.round((100 * used) / most));
  node.textContent = t("context", { used: number(used), limit: number(most), percent });
  node.classList.toggle("full", percent >= 90);
}

function showHistory() {
  historyView.show(current, (id) => chat.running(id));
}

function applyAppearance() {
  const { theme, language } = store.settings;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  setLanguage(language);
  translate(document);
  messages.forget();
  attachments.show();
  $("language").textContent = t("otherLanguage");
  $("language").setAttribute("aria-label", t("otherLanguageLabel"));
  const name = t({ auto: "themeAuto", light: "themeLight", dark: "themeDark" }[theme] ?? "themeAuto");
  $("theme").title = t("themeNow", { name });
  $("theme").setAttribute("aria-label", $("theme").title);
  showModels();
  show({ keepPlace: true });
  showHistory();
}

// Models

function showModels() {
  const chosen = models.some(({ id }) => id === store.settings.model) ? store.settings.model : models[0]?.id;
  $("model").replaceChildren(
    ...(models.length ? models : [{ id: "" }]).map(({ id }) => {
      const option = make("option", "", id || t("noModel"));
      option.value = id;
      option.selected = id === chosen;
      return option;
    }),
  );
  $("model").disabled = models.length < 2;
  showStarters(model(), ask);
  document.body.classList.toggle("several-models", models.length > 1); // then answers say whose they are
}

/** True where the server named its models; else what is wrong is shown. */
async function loadModels() {
  try {
    models = await listModels(store.key);
    if (!models.length) throw new ApiError("noModels");
    problems.delete(NEW);
  } catch (error) {
    models = [];
    problems.set(draftId(), error instanceof ApiError ? error : new ApiError("failed", String(error)));
  }
  showModels();
  showNotice();
  showContext();
  if (problems.get(draftId())?.kind === "unauthorized") openSettings();
  return models.length > 0;
}

// What is done

function open(id) {
  keepDraft();
  editing = null;
  current = store.conversations.has(id) ? id : null;
  if (!current) historyView.clearSearch();
  window.history.replaceState(null, "", current ? `#${current}` : location.pathname + location.search);
  restoreDraft();
  closeDrawer();
  show();
  showHistory();
  if (!touch.matches) $("question").focus();
}

function remove(id) {
  const removed = store.conversations.get(id);
  chat.stop(id);
  store.delete(id);
  if (id === current) open(null);
  else showHistory();
  toast(t("deleted"), t("undo"), () => {
    store.save(removed);
    showHistory();
  });
}

function openSettings() {
  const unauthorized = problems.get(draftId())?.kind === "unauthorized";
  settings.open(unauthorized ? t(store.key ? "unauthorizedKey" : "unauthorized") : "");
}

async function answer(options) {
  if (!models.length && !(await loadModels())) return;
  problems.delete(current);
  const asked = conversation();
  const done = chat.answer(asked, model(), options);
  show();
  showHistory();
  await done;
}

async function retry() {
  problems.delete(draftId());
  notice.clear();
  if (!(await loadModels())) return;
  if (conversation() && conversation().messages.at(-1).role !== "assistant") await answer();
  else show({ keepPlace: true });
}

async function send() {
  const content = $("question").value.trim();
  const { files } = attachments;
  if ((!content && !files.length) || chat.running(current)) return;
  const question = { content, files };
  let asked = conversation();
  if (!asked) {
    asked = { id: newId(), title: (content || files[0].name).split("\n")[0].slice(0, TITLE), updated: Date.now(), messages: [] };
    store.saveDraft(NEW, "");
    historyView.clearSearch();
  }
  if (editing === null) asked.messages.push({ role: "user", versions: [question], current: 0 });
  else addVersion(asked, editing, question);
  store.save(asked);
  pending.delete(draftId());
  current = asked.id;
  window.history.replaceState(null, "", `#${current}`);
  if (editing === null) store.saveDraft(current, "");
  editing = null;
  problems.delete(NEW);
  restoreDraft();
  show();
  showHistory();
  await answer();
}

/** Asks one of the questions of the welcome page. */
function ask(question) {
  $("question").value = question;
  send();
}

/** Puts a question, by default the last, into the box. */
function beginEdit(index = conversation()?.messages.findLastIndex((message) => message.role === "user") ?? -1) {
  if (index < 0 || chat.running(current)) return;
  keepDraft();
  editing = index;
  const { content, files } = versionOf(conversation().messages[index]);
  $("question").value = content;
  attachments.set([...files]);
  showComposer();
  $("question").focus();
}

function endEdit() {
  editing = null;
  restoreDraft();
  showComposer();
}

function restoreDraft() {
  $("question").value = store.drafts[draftId()] ?? "";
  attachments.set(pending.get(draftId()) ?? []);
}

function exportAs(content, type, extension) {
  const title = conversation().title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  download(`${title || "warpbus"}.${extension}`, content, type);
  $("export-menu").hidePopover();
}

function keepDraft() {
  if (editing !== null) return;
  store.saveDraft(draftId(), $("question").value);
  pending.set(draftId(), attachments.files);
}

// The composer

function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

let keeping = 0;
$("question").addEventListener("input", () => {
  showComposer();
  clearTimeout(keeping);
  keeping = setTimeout(keepDraft, 300);
});
$("question").addEventListener("keydown", (event) => {
  if (event.isComposing || event.keyCode === 229) return; // Enter belongs to the input method
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Enter" && (command || (!event.shiftKey && !touch.matches))) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("question").value) {
    event.preventDefault();
    beginEdit();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running(current)) chat.stop(current);
  else send();
});

// The drawer: beside the messages, or over them on a narrow screen

function applyDrawer() {
  const shown = narrow.matches ? document.body.classList.contains("drawer-open") : store.settings.sidebar;
  document.body.classList.toggle("no-drawer", !shown);
  $("drawer").inert = !shown;
  $("stage").inert = narrow.matches && shown;
  $("shade").hidden = !(narrow.matches && shown);
  $("show").setAttribute("aria-expanded", String(shown));
}

function closeDrawer() {
  if (!narrow.matches) return;
  document.body.classList.remove("drawer-open");
  applyDrawer();
}

function toggleDrawer(shown) {
  if (narrow.matches) document.body.classList.toggle("drawer-open", shown);
  else store.saveSettings({ sidebar: shown });
  applyDrawer();
  (shown ? $("hide") : $("show")).focus();
}

narrow.addEventListener("change", () => {
  document.body.classList.remove("drawer-open");
  applyDrawer();
});
$("show").addEventListener("click", () => toggleDrawer(true));
$("hide").addEventListener("click", () => toggleDrawer(false));
$("shade").addEventListener("click", () => toggleDrawer(false));

// The rest

$("new").addEventListener("click", () => open(null));
$("new-top").addEventListener("click", () => open(null));
$("export-markdown").addEventListener("click", () => {
  const names = { user: t("you"), assistant: t("model"), tool: t("results") };
  exportAs(asMarkdown(conversation(), (role) => names[role]), "text/markdown", "md");
});
$("export-json").addEventListener("click", () => exportAs(store.export([conversation()]), "application/json", "json"));
$("model").addEventListener("change", () => {
  store.saveSettings({ model: $("model").value });
  showStarters(model(), ask);
  showContext();
});
$("theme").addEventListener("click", () => {
  store.saveSettings({ theme: THEMES[(THEMES.indexOf(store.settings.theme) + 1) % THEMES.length] });
  applyAppearance();
});
$("language").addEventListener("click", () => {
  store.saveSettings({ language: document.documentElement.lang === "en" ? "zh" : "en" });
  applyAppearance();
});

document.addEventListener("keydown", (event) => {
  if (event.isComposing || $("settings").open || $("export-menu").matches(":popover-open")) return;
  const command = event.ctrlKey || event.metaKey;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    if (document.body.classList.contains("drawer-open")) toggleDrawer(false);
    else if (editing !== null) endEdit();
    else if (event.target !== $("search")) chat.stop(current);
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    open(null);
  } else if (command && event.key.toLowerCase() === "k") {
    event.preventDefault();
    if (document.body.classList.contains("no-drawer")) toggleDrawer(true);
    $("search").focus();
  } else if (event.key === "/" && !typing && !command) {
    event.preventDefault();
    $("question").focus();
  }
});

// Another tab's work; an answer that is coming here is the newer one.
addEventListener("storage", (event) => {
  const id = event.key?.slice(event.key.lastIndexOf(".") + 1);
  if (chat.running(id) || !store.reread(event.key)) return;
  if (id === current && !conversation()) open(null);
  else if (id === current) show({ keepPlace: true });
  showHistory();
});
addEventListener("pagehide", () => {
  keepDraft();
  if (chat.running(current)) store.save(conversation());
});

// Where a keyboard on the screen covers the page without making it smaller (Safari), the page follows what is visible.
visualViewport?.addEventListener("resize", () => {
  if (visualViewport.scale !== 1) return; // magnified by its reader
  document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
  scrollTo(0, 0);
});

speak(TABLES);
store.load();
const wanted = location.hash.slice(1);
current = store.conversations.has(wanted) ? wanted : null;
restoreDraft();
applyAppearance();
applyDrawer();
if (!touch.matches) $("question").focus();
loadModels();
