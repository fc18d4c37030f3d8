// What the page keeps in the browser: conversations, drafts, settings and the API key. Whatever is found there or imported
// is checked field by field; where nothing can be stored the page works on, and `onProblem` hears of it once.

import { newAnswer, textOf } from "./conversation.js";

const CHAT = "warpbus.chat.";
const SETTINGS = "warpbus.settings";
const DRAFT = "warpbus.draft.";
const KEY = "warpbus.key";
/** Numbers that requests take; null: the server's default. */
export const NUMBERS = [
  ...["temperature", "top_p", "max_tokens", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
  ...["seed", "min_tokens", "thinking_token_budget"],
];
const DEFAULTS = {
  ...{ theme: "auto", language: "auto", model: "", system: "", stop: "", thinking: "auto", tools: "", sidebar: true },
  ...Object.fromEntries(NUMBERS.map((name) => [name, null])),
};
const IMPORT_LIMIT = 5000; // conversations

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const count = (value) => (Number.isFinite(value) && value >= 0 ? value : null);

/** What each role's version has; null where `value` is none. */
const READERS = {
  user(value) {
    if (typeof value?.content !== "string") return null;
    const files = list(value.files).map((file) => ({ name: text(file?.name).slice(0, 200), text: text(file?.text) }));
    return { content: value.content, files };
  },
  assistant(value) {
    if (typeof value?.content !== "string") return null;
    const { stats, ...blank } = newAnswer(text(value.model));
    for (const name of Object.keys(stats)) stats[name] = count(value.stats?.[name]);
    return {
      ...blank,
      content: value.content,
      reasoning: text(value.reasoning),
      thought: count(value.thought),
      calls: list(value.calls).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
      finish: ["stop", "length", "stopped"].includes(value.finish) ? value.finish : null,
      stats,
    };
  },
  tool(value) {
    if (!Array.isArray(value?.results)) return null;
    return { results: value.results.map((one) => ({ id: text(one?.id), name: text(one?.name), content: text(one?.content) })) };
  },
};

function readVersion(role, value) {
  const version = READERS[role](value);
  if (!version || value.tail === undefined) return version;
  const tail = readMessages(value.tail);
  return tail && { ...version, tail };
}

function readMessage(value) {
  if (!Object.hasOwn(READERS, value?.role ?? "")) return null;
  const { role } = value;
  const plain = role === "user" && typeof value.content === "string"; // as earlier releases stored a question
  if (!plain && !Array.isArray(value.versions)) return null;
  const versions = (plain ? [value] : value.versions).map((version) => readVersion(role, version)).filter(Boolean);
  if (!versions.length) return null;
  const current = Number.isInteger(value.current) ? value.current : 0;
  const message = { role, versions, current: Math.min(Math.max(current, 0), versions.length - 1) };
  delete message.versions[message.current].tail;
  return message;
}

function readMessages(value) {
  const messages = Array.isArray(value) ? value.map(readMessage) : [null];
  return messages.includes(null) ? null : messages;
}

/** The conversation in `value`, or null where it is none. */
function readConversation(value) {
  if (typeof value?.id !== "string" || !/^[\w-]{1,64}$/.test(value.id)) return null;
  let messages = null;
  try {
    messages = readMessages(value.messages);
  } catch {
    // Nested deeper than the page ever does.
  }
  if (!messages) return null;
  return { id: value.id, title: text(value.title).slice(0, 200), updated: count(value.updated) ?? 0, messages };
}

export function newId() {
  // crypto.randomUUID is missing where the page comes over plain HTTP from another machine.
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Store {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.conversations = new Map();
    this.shown = new Set();
    this.settings = { ...DEFAULTS };
    this.drafts = {};
    this.memoryKey = "";
  }

  /** Reads all that is there; what is damaged stays in the storage but is left out. */
  load() {
    try {
      localStorage.getItem(SETTINGS);
    } catch {
      this.problem("storageAway");
      return;
    }
    const settings = this.readJson(SETTINGS);
    for (const [name, usual] of Object.entries(DEFAULTS)) {
      const value = settings?.[name];
      if (usual === null ? Number.isFinite(value) : typeof value === typeof usual) this.settings[name] = value;
    }
    let damaged = 0;
    for (const name of Object.keys(localStorage)) {
      if (name.startsWith(DRAFT)) this.drafts[name.slice(DRAFT.length)] = text(this.readJson(name));
      if (!name.startsWith(CHAT)) continue;
      const conversation = readConversation(this.readJson(name));
      if (conversation && CHAT + conversation.id === name) this.conversations.set(conversation.id, conversation);
      else damaged += 1;
    }
    if (damaged) this.problem("storageDamaged", { n: damaged });
  }

  /** Another tab changed what is stored under `name`; true where that is a conversation. */
  reread(name) {
    if (!name?.startsWith(CHAT)) return false;
    const conversation = readConversation(this.readJson(name));
    if (conversation) this.conversations.set(conversation.id, conversation);
    else this.conversations.delete(name.slice(CHAT.length));
    return true;
  }

  readJson(name) {
    try {
      return JSON.parse(localStorage.getItem(name));
    } catch {
      return null;
    }
  }

  write(name, value) {
    try {
      localStorage.setItem(name, JSON.stringify(value));
      this.shown.delete("storageFull");
    } catch (error) {
      this.problem(error.name === "QuotaExceededError" ? "storageFull" : "storageAway");
    }
  }

  erase(name) {
    try {
      localStorage.removeItem(name);
    } catch {
      this.problem("storageAway");
    }
  }

  problem(key, values) {
    if (this.shown.has(key)) return;
    this.shown.add(key);
    this.onProblem(key, values);
  }

  /** The latest first; with `search`, those that have every word of it in title or messages. */
  list(search = "") {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...this.conversations.values()].filter((conversation) => {
      if (!words.length) return true;
      const parts = conversation.messages.map(textOf);
      const whole = [conversation.title, ...parts].join("\n").toLowerCase();
      return words.every((word) => whole.includes(word));
    });
    return found.sort((a, b) => b.updated - a.updated);
  }

  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    this.write(CHAT + conversation.id, conversation);
  }

  delete(id) {
    this.conversations.delete(id);
    this.erase(CHAT + id);
    this.saveDraft(id, "");
  }

  saveSettings(changes) {
    Object.assign(this.settings, changes);
    this.write(SETTINGS, this.settings);
  }

  saveDraft(id, draft) {
    if ((this.drafts[id] ?? "") === draft) return;
    this.drafts[id] = draft;
    if (draft) this.write(DRAFT + id, draft);
    else this.erase(DRAFT + id);
  }

  get key() {
    try {
      return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? this.memoryKey;
    } catch {
      return this.memoryKey;
    }
  }

  get remembered() {
    try {
      return localStorage.getItem(KEY) !== null;
    } catch {
      return false;
    }
  }

  saveKey(key, remember) {
    this.memoryKey = key;
    try {
      for (const [storage, wanted] of [[sessionStorage, !remember], [localStorage, remember]]) {
        if (wanted && key) storage.setItem(KEY, key);
        else storage.removeItem(KEY);
      }
    } catch {
      this.problem("storageAway");
    }
  }

  /** JSON of the conversations given, or of all. */
  export(conversations = this.list()) {
    return JSON.stringify({ warpbus: 1, conversations }, null, 1);
  }

  /** Adds the conversations of an export; one that is here already stays where it is newer. Returns how many, null if none is meant. */
  import(json) {
    let given;
    try {
      given = JSON.parse(json)?.conversations;
    } catch {
      return null;
    }
    if (!Array.isArray(given) || given.length > IMPORT_LIMIT) return null;
    const read = given.map(readConversation);
    if (read.includes(null)) return null;
    const newer = read.filter(({ id, updated }) => (this.conversations.get(id)?.updated ?? -1) < updated);
    for (const conversation of newer) this.save(conversation);
    return newer.length;
  }
}
