// The dialog of the settings. Each field is stored when it changes.

import { readTools } from "./chat.js";
import { $, download, make, toast } from "./dom.js";
import { number, t } from "./language.js";
import { NUMBERS } from "./store.js";

// What the API does where neither a request nor the model says anything; a text is a name in strings.js.
const USUAL = {
  ...{ temperature: 1, top_p: 1, max_tokens: "usualRest", top_k: "usualAll", min_p: 0, repetition_penalty: 1 },
  ...{ presence_penalty: 0, frequency_penalty: 0, seed: "usualRandom", min_tokens: 0, thinking_token_budget: "usualNoLimit" },
};
const TEXTS = ["system", "stop", "tools"];
const MOD = /Mac|iP(hone|ad)/.test(navigator.userAgent) ? "⌘" : "Ctrl";
const SHORTCUTS = [
  ["Enter", "keySend"],
  ["Shift + Enter", "keyLine"],
  ["Esc", "keyStop"],
  ["↑", "keyEdit"],
  ["/", "keyFocus"],
  [`${MOD} + K`, "keySearch"],
  [`${MOD} + Shift + O`, "keyNew"],
];

export class SettingsDialog {
  /** `actions`: appearance() after theme or language, closed(keyChanged), data() after an import or deletion, model() - the one chosen. */
  constructor(store, actions) {
    this.store = store;
    this.actions = actions;
    this.dialog = $("settings");
    $("settings-open").addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", () => actions.closed(this.store.key !== this.keyBefore));
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
    for (const name of NUMBERS) $(name).addEventListener("input", () => this.readNumber(name));
    for (const name of TEXTS) {
      $(name).addEventListener("input", () => {
        store.saveSettings({ [name]: $(name).value });
        this.showTools();
      });
    }
    $("thinking-choice").addEventListener("change", () => store.saveSettings({ thinking: $("thinking-choice").value }));
    for (const id of ["key", "remember"]) {
      $(id).addEventListener("input", () => store.saveKey($("key").value.trim(), $("remember").checked));
    }
    for (const name of ["theme", "language"]) {
      $(`${name}-choice`).addEventListener("change", () => {
        store.saveSettings({ [name]: $(`${name}-choice`).value });
        actions.appearance();
        this.fill();
      });
    }
    $("export").addEventListener("click", () => this.export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import());
    $("delete-all").addEventListener("click", () => this.deleteAll());
  }

  /** `problem` is a sentence about the API key, which then has the focus. */
  open(problem = "") {
    this.keyBefore = this.store.key;
    $("settings-problem").textContent = problem;
    $("settings-problem").hidden = !problem;
    this.fill();
    if (!this.dialog.open) this.dialog.showModal();
    if (problem) $("key").focus();
  }

  fill() {
    const { settings } = this.store;
    const model = this.actions.model();
    for (const name of NUMBERS) {
      const usual = model?.defaults[name] ?? USUAL[name];
      $(name).value = settings[name] ?? "";
      $(name).placeholder = typeof usual === "number" ? number(usual, 3) : t(usual);
    }
    for (const name of TEXTS) $(name).value = settings[name];
    $("thinking-choice").value = settings.thinking;
    $("thinking-fields").hidden = !model?.reasoning;
    $("tools-fields").hidden = !model?.tools;
    this.showTools();
    $("key").value = this.store.key;
    $("remember").checked = this.store.remembered;
    $("theme-choice").value = settings.theme;
    $("language-choice").value = settings.language;
    this.sure = false;
    $("delete-all").textContent = t("deleteAll");
    $("delete-all").disabled = this.store.conversations.size === 0;
    $("shortcuts").replaceChildren(
      ...SHORTCUTS.flatMap(([keys, what]) => {
        const term = make("dt");
        term.append(...keys.split(" + ").map((key) => make("kbd", "", key)));
        return [term, make("dd", "", t(what))];
      }),
    );
  }

  /** A number out of its range is marked by the browser and not used. */
  readNumber(name) {
    const field = $(name);
    if (field.validity.valid) this.store.saveSettings({ [name]: field.value === "" ? null : field.valueAsNumber });
  }

  /** Tools that are no list of tools are not sent. */
  showTools() {
    const valid = readTools($("tools").value) !== null;
    $("tools").setAttribute("aria-invalid", String(!valid));
    $("tools-note").textContent = t(valid ? "toolsNote" : "toolsWrong");
    $("tools-note").classList.toggle("danger", !valid);
  }

  export() {
    download(`warpbus-${new Date().toISOString().slice(0, 10)}.json`, this.store.export(), "application/json");
  }

  async import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    const added = file ? this.store.import(await file.text()) : null;
    toast(added === null ? t("importFailed") : t("imported", { n: added }));
    this.fill();
    this.actions.data();
  }

  /** The first click asks, the second does it. */
  deleteAll() {
    if (!this.sure) {
      this.sure = true;
      $("delete-all").textContent = t("deleteAllSure", { n: this.store.conversations.size });
      return;
    }
    for (const id of [...this.store.conversations.keys()]) this.store.delete(id);
    toast(t("deletedAll"));
    this.fill();
    this.actions.data();
  }
}
