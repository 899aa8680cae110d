"use strict";
// Requests to the server: the token, one stream per answer, and a plain sentence for everything that can go wrong.

const SILENT = "The server does not respond. Is homing serve still running?";
const BROKEN_OFF = "The connection was lost before the end of the answer. Is homing serve still running?";
const WRONG_TOKEN = "This token does not belong to the running server.";
const TOKEN_KEY = "homing-token";
let token = "";

// Thrown for every failed request. `code` is the server's own ("context_length_exceeded", "queue_full"), or "unauthorized"
// or "offline"; message is what a person reads.
class Problem extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

// Return the models of the server; the first one is the default.
async function fetch_models() {
  token = take_token(TOKEN_KEY);
  if (!token) throw new Problem("", "unauthorized");
  if (!/^[\x21-\x7e]+$/.test(token)) throw new Problem("The token has invalid characters.", "unauthorized");
  return (await (await request("v1/models")).json()).data;
}

function use_token(text) {
  tab_storage.setItem(TOKEN_KEY, text);
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { "Authorization": "Bearer " + token, "Content-Type": "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(SILENT, "offline");
  }
  if (!response.ok) throw await problem_of(response);
  return response;
}

async function problem_of(response) {
  let found = {};
  try { found = (await response.json()).error || {}; } catch { /* a proxy in between sends no JSON */ }
  if (response.status === 401) return new Problem(WRONG_TOKEN, "unauthorized");
  const message = found.message || `The server answered with status ${response.status} ${response.statusText}.`;
  if (response.status === 503) {
    const wait = Number(response.headers.get("retry-after")) || 5;
    return new Problem(message.replace(" Try again soon.", "") + ` Try again in ${wait} seconds.`, "busy");
  }
  return new Problem(message, found.code || "refused");
}

// Parse server-sent events from a body that arrives in arbitrary pieces.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

// Generate one answer. `messages` is a conversation, or a string that the model continues. Pass each piece of text to
// `tell`. Return { reason, usage, tokens_per_s }; throw a Problem, or an AbortError if the signal stopped it.
async function generate(model, messages, settings, signal, tell) {
  const is_text = typeof messages === "string";
  const body = {
    model: model.id, ...(is_text ? { prompt: messages } : { messages }), ...settings,
    stream: true, stream_options: { include_usage: true },
  };
  const began = performance.now();
  const response = await request(is_text ? "v1/completions" : "v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  let reason = "", usage = null, first = 0, last = 0;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return { reason, usage, tokens_per_s: speed(usage?.completion_tokens || 0, began, first, last) };
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(chunk.error.message, "failed");
      usage = chunk.usage || usage;
      for (const choice of chunk.choices) {
        const piece = (is_text ? choice.text : choice.delta.content) || "";
        if (piece) {
          last = performance.now();
          first = first || last;
          tell(piece);
        }
        reason = choice.finish_reason || reason;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
  }
  throw new Problem(BROKEN_OFF, "broken");
}

// The first token also waits for the prompt to be read and for the queue, so the speed is that of the tokens after it.
// A short answer may arrive in one piece; then only the time since the request tells something.
function speed(num_tokens, began, first, last) {
  if (!num_tokens || !first) return null;
  return last - first > 100 ? (num_tokens - 1) * 1000 / (last - first) : num_tokens * 1000 / (last - began);
}
