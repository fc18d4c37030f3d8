// The server's OpenAI-compatible API. Knows nothing of the page.

/** kind: unauthorized | busy | restarting | away | tooLong | failed; retryAfter in seconds where the server said so. */
export class ApiError extends Error {
  constructor(kind, message = "", retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
  }
}

async function request(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && key && /[^\x20-\xff]/.test(key)) throw new ApiError("unauthorized");
    throw new ApiError("away", error.message);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  let error = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // A proxy's page, not the server's JSON.
  }
  return classify(response.status, error, response.headers.get("Retry-After"));
}

/** An error object of the API; in the middle of a stream there is no status, and its type tells. */
function classify(status, error, retryAfter = null) {
  const message = String(error.message ?? `HTTP ${status}`);
  const seconds = retryAfter !== null && /^\d+$/.test(retryAfter) ? Number(retryAfter) : null;
  if (status === 401 || status === 403) return new ApiError("unauthorized", message);
  if (error.code === "asleep") return new ApiError("failed", message); // waiting would not wake it
  if (status === 429 || error.type === "rate_limit_error") return new ApiError("busy", message, seconds);
  if ([502, 503, 504].includes(status) || error.type === "service_unavailable") return new ApiError("restarting", message);
  if (status === 413 || error.code === "context_length_exceeded") return new ApiError("tooLong", message);
  return new ApiError("failed", message);
}

/** [{id, limit}]: the models by name, and how many tokens each can read (null where the server does not say). */
export async function listModels(key) {
  const { data } = await (await request("v1/models", key)).json();
  return (Array.isArray(data) ? data : []).map(({ id, max_model_len: limit }) => ({
    id: String(id),
    limit: Number.isInteger(limit) ? limit : null,
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

/** Yields {text, finish, usage}, each undefined where a chunk has none of it. Throws ApiError, and AbortError by `signal`. */
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
    yield { text: choice?.delta?.content ?? undefined, finish: choice?.finish_reason ?? undefined, usage: chunk.usage ?? undefined };
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
