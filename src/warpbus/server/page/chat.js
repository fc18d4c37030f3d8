// Asking the server and putting what comes into a conversation. Knows nothing of the page but two callbacks.

import { streamChat } from "./api.js";
import { addVersion, apiMessages, dropVersion, isEmpty, newAnswer, versionOf } from "./conversation.js";
import { ApiError } from "./request.js";
import { NUMBERS } from "./store.js";

const SAVE_EVERY = 2000; // ms, while an answer comes
const OPENING = "<think>";
const CLOSING = "</think>";

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

  /**
   * Answers the last message; with `at`, adds a version to the answer of this index; with `goOn`, continues the last one.
   * `model` is one of `listModels`.
   */
  async answer(conversation, model, { at = null, goOn = false } = {}) {
    const { id, messages } = conversation;
    if (this.runs.has(id)) return;
    if (at !== null) addVersion(conversation, at, newAnswer(model.id));
    else if (!goOn) messages.push({ role: "assistant", versions: [newAnswer(model.id)], current: 0 });
    const version = versionOf(messages.at(-1));
    const body = { model: model.id, messages: this.prompt(goOn ? messages : messages.slice(0, -1)), ...this.options(model) };
    if (goOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    version.finish = null;
    conversation.updated = Date.now();
    const controller = new AbortController();
    this.runs.set(id, controller);
    this.store.save(conversation);
    let problem = null;
    const written = JSON.stringify([version.content, version.reasoning, version.calls]);
    try {
      await this.receive(conversation, version, body, controller.signal);
    } catch (error) {
      if (error.name === "AbortError") version.finish = "stopped";
      else problem = error instanceof ApiError ? error : new ApiError("failed", String(error));
    }
    if (problem) problem.midway = JSON.stringify([version.content, version.reasoning, version.calls]) !== written;
    this.runs.delete(id);
    if (isEmpty(version) && (problem || version.finish === "stopped")) dropVersion(conversation);
    conversation.updated = Date.now();
    if (this.store.conversations.has(id)) this.store.save(conversation);
    this.ended(id, problem);
  }

  async receive(conversation, version, body, signal) {
    const began = performance.now();
    const before = version.stats.completion ?? 0;
    const reader = new AnswerReader(version);
    let first = 0;
    let last = 0;
    let saved = began;
    for await (const { text, reasoning, calls, finish, usage } of streamChat(body, this.store.key, signal)) {
      if (text || reasoning || calls) {
        last = performance.now();
        first ||= last;
        reader.take({ text, reasoning, calls }, last);
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
        version.stats.reasoning = usage.completion_tokens_details?.reasoning_tokens || version.stats.reasoning;
        // The first token is what the time before it was spent on.
        version.stats.speed = last > first && completion > 1 ? ((completion - 1) / (last - first)) * 1000 : null;
      }
    }
    if (first) version.stats.first = (first - began) / 1000;
  }

  /** The messages of the API, with the system prompt. */
  prompt(messages) {
    const system = this.store.settings.system.trim();
    return [...(system ? [{ role: "system", content: system }] : []), ...apiMessages(messages)];
  }

  /** What the settings say, as far as the model has a use for it. */
  options(model) {
    const { settings } = this.store;
    const given = NUMBERS.filter((name) => settings[name] !== null && (name !== "thinking_token_budget" || model.reasoning));
    const options = Object.fromEntries(given.map((name) => [name, settings[name]]));
    const stop = settings.stop.split("\n").filter(Boolean);
    if (stop.length) options.stop = stop;
    if (model.reasoning && settings.thinking !== "auto") options.enable_thinking = settings.thinking === "on";
    const tools = model.tools ? readTools(settings.tools) : null;
    if (tools?.length) options.tools = tools;
    return options;
  }
}

/** Puts the parts of one answer into its version. */
class AnswerReader {
  constructor(version) {
    this.version = version;
    this.raw = version.content ? null : ""; // the text so far, while it may begin with <think>
    this.inText = false; // the thinking is in the text
    this.began = 0; // of the thinking
    this.firstCall = version.calls.length;
  }

  take({ text, reasoning, calls }, now) {
    const { version } = this;
    if (reasoning) {
      this.began ||= now;
      version.reasoning += reasoning;
      version.thought = (now - this.began) / 1000;
    }
    if (text) this.takeText(text, now);
    for (const { index = 0, id, function: called } of calls ?? []) {
      const call = (version.calls[this.firstCall + index] ??= { id: "", name: "", arguments: "" });
      if (id) call.id = id;
      call.name += called?.name ?? "";
      call.arguments += called?.arguments ?? "";
    }
  }

  /** Models whose template says nothing of thinking write it into their text. */
  takeText(text, now) {
    const { version } = this;
    if (this.raw === null || (version.reasoning && !this.inText)) {
      version.content += text;
      return;
    }
    this.raw += text;
    const written = this.raw.trimStart();
    if (!written.startsWith(OPENING)) {
      version.content = this.raw;
      if (!OPENING.startsWith(written)) this.raw = null;
      return;
    }
    this.inText = true;
    this.began ||= now;
    const end = written.indexOf(CLOSING);
    version.reasoning = written.slice(OPENING.length, end < 0 ? undefined : end).trim();
    version.content = end < 0 ? "" : written.slice(end + CLOSING.length).trimStart();
    if (end < 0 || version.thought === null) version.thought = (now - this.began) / 1000;
  }
}

/** OpenAI's list of tools in a text; null where it is none. */
export function readTools(text) {
  if (!text.trim()) return [];
  try {
    const tools = JSON.parse(text);
    const named = ({ type, function: described }) => type === "function" && typeof described?.name === "string";
    return Array.isArray(tools) && tools.every(named) ? tools : null;
  } catch {
    return null;
  }
}
