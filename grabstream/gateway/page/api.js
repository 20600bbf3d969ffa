// Requests to the gateway. The API key, or the token of a user, is kept by the tab alone, and sent as
// Authorization. `key.name` is the name under which the tab keeps it.

import { parsedExactly } from "./exact.js";

export const key = {
  name: "grabstream.key",
  get: () => sessionStorage.getItem(key.name) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(key.name, value);
    else sessionStorage.removeItem(key.name);
  },
};

/** An answer other than success: `status`, the problem in words, and after how many ms to ask again (0:
 * unknown). */
export class Refused extends Error {
  constructor(status, problem, retryAfterMs = 0) {
    super(problem.detail ?? problem.title ?? `The gateway answered ${status}.`);
    this.status = status;
    this.problem = problem;
    this.retryAfterMs = retryAfterMs;
  }
}

const CLOCK_MS = 2000;
let clockAheadMs = 0;

/** The time of the gateway, in ms since 1970. It sends its time in seconds, so small differences are ignored.
 * */
export const now = () => Date.now() + clockAheadMs;

function compareClocks(answer) {
  const ahead = Date.parse(answer.headers.get("Date") ?? "") + 500 - Date.now();
  if (!Number.isNaN(ahead)) clockAheadMs = Math.abs(ahead) > CLOCK_MS ? ahead : 0;
}

/** A request without an answer. */
export class Unreachable extends Error {}

// Wrong keys are counted against the address that sends them. So the first request with a key goes alone, and
// after a 401 none is sent until there is another key.
const LOCKED = "The gateway requires an API key.";
let isKnown = false;
let isLocked = false;
let trial = null;

document.addEventListener("key-changed", () => {
  isKnown = false;
  isLocked = false;
  trial = null;
});

async function ask(path, options) {
  while (!isKnown && trial && !isLocked) await trial;
  if (isLocked) throw new Refused(401, { type: "/problems/unauthenticated", detail: LOCKED });
  if (isKnown) return answerOf(path, options);
  let end;
  const mine = (trial = new Promise((resolve) => (end = resolve)));
  try {
    return await answerOf(path, options);
  } finally {
    if (trial === mine) trial = null;
    end();
  }
}

async function answerOf(path, options) {
  const sent = key.get();
  const headers = { ...options.headers };
  if (sent) headers.Authorization = `Bearer ${sent}`;
  let answer;
  let text;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-cache", credentials: "omit", redirect: "error" });
    compareClocks(answer);
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The gateway cannot be reached.");
  }
  let body = {};
  try {
    body = Object(parsedExactly(text));
  } catch {
    if (answer.ok) throw new Unreachable("The answer is not from the gateway.");
  }
  if (!answer.ok) {
    if (answer.status === 401 && sent === key.get()) {
      isLocked = true;
      document.dispatchEvent(new CustomEvent("key-wanted", { detail: body.detail }));
    }
    throw new Refused(answer.status, body, 1000 * (Number(answer.headers.get("Retry-After")) || 0));
  }
  isKnown = isKnown || sent === key.get();
  return body;
}

export const get = (path, signal) => ask(path, { signal });

/** Sends a command, unless the signal aborts before. The same key again gets the first answer. */
export const send = (method, path, body, idempotencyKey, signal) =>
  ask(path, {
    method,
    signal,
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "Idempotency-Key": idempotencyKey },
  });

/** A key that no other command has. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export const part = encodeURIComponent;

const SLOWER_MAX = 15;

/**
 * Calls `run` now and every `ms` after it has ended, until the signal aborts; not while the tab is hidden.
 * After an error, the pause doubles, up to 15 times. `report(error or null, source)` hears how each call went;
 * `source` is this poll.
 */
export function poll(run, ms, signal, report) {
  let timer = 0;
  let failures = 0;
  let running = false;
  const source = {};
  async function once() {
    if (running || signal.aborted || document.hidden) return;
    running = true;
    clearTimeout(timer);
    try {
      await run(signal);
      failures = 0;
      if (!signal.aborted) report(null, source);
    } catch (error) {
      if (signal.aborted) return;
      failures += 1;
      report(error, source);
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    } finally {
      running = false;
      if (!signal.aborted) timer = setTimeout(once, ms * Math.min(2 ** failures, SLOWER_MAX));
    }
  }
  document.addEventListener("visibilitychange", once, { signal });
  document.addEventListener("key-changed", once, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  once();
  return once;
}
