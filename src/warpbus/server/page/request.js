// Requests to the server, and what its refusals mean. Knows nothing of the page.

/**
 * kind: unauthorized | busy | restarting | away | tooLong | failed; retryAfter in seconds where the server said so; midway: a
 * part of the answer had come.
 */
export class ApiError extends Error {
  constructor(kind, message = "", retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
    this.midway = false;
  }
}

/** The response to a request with the API key, if there is one. Throws ApiError unless it is a success. */
export async function request(path, key, options = {}) {
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
export function classify(status, error, retryAfter = null) {
  const message = String(error.message ?? `HTTP ${status}`);
  const seconds = retryAfter !== null && /^\d+$/.test(retryAfter) ? Number(retryAfter) : null;
  if (status === 401 || status === 403) return new ApiError("unauthorized", message);
  if (error.code === "asleep") return new ApiError("failed", message); // waiting would not wake it
  if (status === 429 || error.type === "rate_limit_error") return new ApiError("busy", message, seconds);
  if ([502, 503, 504].includes(status) || error.type === "service_unavailable") return new ApiError("restarting", message);
  if (status === 413 || error.code === "context_length_exceeded") return new ApiError("tooLong", message);
  return new ApiError("failed", message);
}
