// The dialog of the settings. Each field is stored when it changes.

import { $, make, toast } from "./dom.js";
import { t } from "./language.js";

const NUMBERS = ["temperature", "top_p", "max_tokens"];
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
  /** `actions`: appearance() after theme or language, closed(keyChanged), data() after an import or deletion. */
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
    $("system").addEventListener("input", () => store.saveSettings({ system: $("system").value }));
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
    for (const name of NUMBERS) $(name).value = settings[name] ?? "";
    $("system").value = settings.system;
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

  export() {
    const address = URL.createObjectURL(new Blob([this.store.export()], { type: "application/json" }));
    const link = make("a");
    link.href = address;
    link.download = `warpbus-${new Date().toISOString().slice(0, 10)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
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
