// Asking the server and putting what comes into a conversation. Knows nothing of the page but two callbacks.

import { streamChat } from "./api.js";
import { t } from "./language.js";
import { ApiError } from "./request.js";

const SAVE_EVERY = 2000; // ms, while an answer comes

const blank = (model) => ({
  content: "",
  finish: null,
  model,
  stats: { prompt: null, cached: null, completion: null, first: null, speed: null },
});

export class Chat {
  /** `grown(id)`: text came; `ended(id, error)`: an answer ended, by an ApiError where it is not null. */
  constructor(store, { grown, ended }) {
    this.store = store;
    this.grown = grown;
    this.ended = ended;
    this.runs = new Map(); // id of a conversation -> AbortController
  }

  running(id) {
    return this.runs.has(id);
  }

  stop(id) {
    this.runs.get(id)?.abort();
  }

  /** Answers the last question: with a new version where there is an answer, or by going on with it. */
  async answer(conversation, model, { goOn = false } = {}) {
    const { id, messages } = conversation;
    if (this.runs.has(id)) return;
    const prompt = this.prompt(messages, goOn);
    const version = goOn ? messages.at(-1).versions[messages.at(-1).current] : blank(model);
    if (messages.at(-1).role === "user") messages.push({ role: "assistant", versions: [version], current: 0 });
    else if (!goOn) messages.at(-1).current = messages.at(-1).versions.push(version) - 1;
    version.finish = null;
    conversation.updated = Date.now();
    const controller = new AbortController();
    this.runs.set(id, controller);
    this.store.save(conversation);
    let problem = null;
    try {
      await this.receive(conversation, version, { model, messages: prompt, ...this.sampling() }, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") version.finish = "stopped";
      else problem = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
    this.runs.delete(id);
    if (!version.content && (problem || version.finish === "stopped")) dropLast(messages);
    conversation.updated = Date.now();
    if (this.store.conversations.has(id)) this.store.save(conversation);
    this.ended(id, problem);
  }

  async receive(conversation, version, body, signal) {
    const began = performance.now();
    const before = version.stats.completion ?? 0;
    let first = 0;
    let last = 0;
    let saved = began;
    for await (const { text, finish, usage } of streamChat(body, this.store.key, signal)) {
      if (text) {
        last = performance.now();
        first ||= last;
        version.content += text;
        this.grown(conversation.id);
        if (last - saved > SAVE_EVERY && this.store.conversations.has(conversation.id)) {
          saved = last;
          this.store.save(conversation);
        }
      }
      if (finish) version.finish = finish === "length" ? "length" : "stop";
      if (usage) {
        const { prompt_tokens: prompt, completion_tokens: completion } = usage;
        version.stats.prompt = prompt ?? null;
        version.stats.cached = usage.prompt_tokens_details?.cached_tokens ?? null;
        version.stats.completion = before + (completion ?? 0);
        // The first token is what the time before it was spent on.
        version.stats.speed = last > first && completion > 1 ? ((completion - 1) / (last - first)) * 1000 : null;
      }
    }
    if (first) version.stats.first = (first - began) / 1000;
  }

  /** What the model reads: all before the answer that is wanted. */
  prompt(messages, goOn) {
    const system = this.store.settings.system.trim();
    const read = goOn || messages.at(-1).role === "user" ? messages : messages.slice(0, -1);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...read.map(({ role, content, versions, current }) => ({ role, content: content ?? versions[current].content })),
      ...(goOn ? [{ role: "user", content: t("continuePrompt") }] : []),
    ];
  }

  sampling() {
    const given = ["temperature", "top_p", "max_tokens"].map((name) => [name, this.store.settings[name]]);
    return Object.fromEntries(given.filter(([, value]) => value !== null));
  }
}

/** Takes an answer back that never began: the version before it, or the question, is the end again. */
function dropLast(messages) {
  const message = messages.at(-1);
  message.versions.splice(message.current, 1);
  message.current = message.versions.length - 1;
  if (!message.versions.length) messages.pop();
}
