// The server's OpenAI-compatible API. Knows nothing of the page.

import { ApiError, classify, request } from "./request.js";

/**
 * [{id, limit, root, defaults, tools, reasoning}]: the models by name; how many tokens each can read (null where the server
 * does not say); the model below an adapter; its defaults of sampling parameters; whether it calls tools and reasons.
 */
export async function listModels(key) {
  const { data } = await (await request("v1/models", key)).json();
  return (Array.isArray(data) ? data : []).map((model) => ({
    id: String(model.id),
    limit: Number.isInteger(model.max_model_len) ? model.max_model_len : null,
    root: String(model.root ?? model.id),
    defaults: model.default_sampling_params ?? {},
    tools: model.tools === true,
    reasoning: model.reasoning === true,
  }));
}

/** True where the server says that it can work. */
export async function isHealthy(key) {
  try {
    await request("health", key);
    return true;
  } catch (error) {
    return error.kind === "unauthorized";
  }
}

/**
 * Yields {text, reasoning, calls, finish, usage}, each undefined where a chunk has none of it; `calls` are parts as the API
 * has them. Throws ApiError, and AbortError by `signal`.
 */
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ApiError("failed", data.slice(0, 200));
    }
    if (chunk.error) throw classify(null, chunk.error);
    const choice = chunk.choices?.[0];
    yield {
      text: choice?.delta?.content || undefined,
      reasoning: choice?.delta?.reasoning_content || choice?.delta?.reasoning || undefined,
      calls: choice?.delta?.tool_calls?.length ? choice.delta.tool_calls : undefined,
      finish: choice?.finish_reason ?? undefined,
      usage: chunk.usage ?? undefined,
    };
  }
}

/** The data of each server-sent event (HTML standard, 9.2.6), whichever way the bytes are cut. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("away", error.message);
      }
      if (part.done) return;
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
