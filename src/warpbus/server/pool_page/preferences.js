// What the page keeps in the browser: theme, language, time range and the API key. Where nothing can be stored it works on.

const SETTINGS = "warpbus.settings"; // first.js reads the theme from here
const KEY = "warpbus.key";
const CHOICES = { theme: ["auto", "light", "dark"], language: ["auto", "en", "zh"], range: [600, 1800, 3600] };

const settings = { theme: "auto", language: "auto", range: 3600 };
let memoryKey = "";

export const preferences = {
  load() {
    try {
      const found = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
      for (const [name, choices] of Object.entries(CHOICES)) {
        if (choices.includes(found?.[name])) settings[name] = found[name];
      }
    } catch {
      // No storage, or nothing sensible in it.
    }
  },

  get: (name) => settings[name],

  set(name, value) {
    settings[name] = value;
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(settings));
    } catch {
      // It lasts until the page is closed.
    }
  },

  get key() {
    try {
      return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? memoryKey;
    } catch {
      return memoryKey;
    }
  },

  saveKey(key, remember) {
    memoryKey = key;
    try {
      for (const [storage, wanted] of [[sessionStorage, !remember], [localStorage, remember]]) {
        if (wanted && key) storage.setItem(KEY, key);
        else storage.removeItem(KEY);
      }
    } catch {
      // The same.
    }
  },
};
