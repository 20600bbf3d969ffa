// Commands of a visitor. Each has one Idempotency-Key, which the tab keeps until an answer says what became of the
// command: after a lost answer, also after the page was loaded again, the same command is sent, and nothing is
// taken twice. A command belongs to the visitor who made it: while another one is there, it waits.

import { Refused, Unreachable, newKey, send } from "./api.js";
import { visitor } from "./visitor.js";

const PAUSE_MS = 1000;
const PAUSE_MS_MAX = 15000;
/** Statuses below 500 after which a repeat may help. */
const PASSING = new Set([408, 425, 429]);

/** The visitor has changed: nothing is sent, and the command waits for its visitor. */
export class Left extends Error {}

const nameOf = (user, path) => `grabstream.command ${user} ${path}`;

/**
 * The command to this path that has no answer yet, or null: its key and body, and whether it may have been decided
 * (`isUnknown`).
 */
export function unanswered(user, path) {
  try {
    return JSON.parse(sessionStorage.getItem(nameOf(user, path)));
  } catch {
    return null; // not written by this page
  }
}

/** Whether a reply names the command with this key. The id may be made of user and key. */
const isOurs = (key, { id }) => id === key || String(id).startsWith("user:");

/** Whether a reply says what became of the command with this key. */
const isAnswerTo = (key, body) => typeof body.outcome === "string" && isOurs(key, body);

/** Whether a gateway says that it refuses this request. */
const isRefusal = (key, problem) =>
  String(problem.type).startsWith("/problems/") && (problem.id === undefined || isOurs(key, problem));

/** Sends a command once. Raises Left when another visitor comes before it is answered. */
async function attempt(user, path, { key, body }) {
  if (visitor.user !== user) throw new Left();
  const control = new AbortController();
  let change;
  const left = new Promise((_, reject) => (change = () => {
    if (visitor.user === user) return;
    reject(new Left());
    control.abort();
  }));
  document.addEventListener("key-changed", change);
  try {
    const answer = await Promise.race([left, send("POST", path, body, key, control.signal)]);
    if (!isAnswerTo(key, answer)) throw new Unreachable("The answer is not to this command.");
    return answer;
  } finally {
    document.removeEventListener("key-changed", change);
  }
}

/** Waits, unless the visitor asks or signs in before; `waits` hears of it. */
async function pause(error, count, waits) {
  const ms = Math.max(error.retryAfterMs ?? 0, Math.min(PAUSE_MS * 2 ** count, PAUSE_MS_MAX));
  let end;
  const ended = new Promise((resolve) => (end = resolve));
  const timer = setTimeout(end, ms);
  document.addEventListener("key-changed", end);
  waits(error, ms, end);
  await ended;
  clearTimeout(timer);
  document.removeEventListener("key-changed", end);
}

/**
 * Sends a command until it is answered, and returns the answer. Raises Refused: the command is over, or, while
 * `unanswered` still has it, waits; and Left. `waits(error, ms, now)` hears when an answer is missing, after how
 * long it is sent again, and gets a function that does so now.
 */
export async function command(user, path, body, waits) {
  const name = nameOf(user, path);
  const kept = unanswered(user, path) ?? { key: newKey(), body, isUnknown: false };
  const keep = (isUnknown) => sessionStorage.setItem(name, JSON.stringify({ ...kept, isUnknown }));
  for (let count = 0; ; count += 1) {
    // The page may be closed before there is an answer.
    keep(true);
    try {
      const answer = await attempt(user, path, kept);
      sessionStorage.removeItem(name);
      return answer;
    } catch (error) {
      const { status, problem } = error;
      const isRefused = error instanceof Refused;
      const isOpen = isRefused ? PASSING.has(status) || status >= 500 : error instanceof Unreachable;
      if (isRefused && !isOpen && isAnswerTo(kept.key, problem) && !(kept.isUnknown && problem.outcome === "invalid")) {
        sessionStorage.removeItem(name);
        throw error;
      }
      // A 503 of a gateway says that it has not decided this request; a 500 or a 504 does not.
      const isUndecided = isRefused && isRefusal(kept.key, problem) && (status < 500 || status === 503);
      kept.isUnknown ||= !isUndecided;
      keep(kept.isUnknown);
      // What was never decided is over with a refusal, but waits for valid credentials.
      if (!isOpen && !kept.isUnknown && status !== 401) sessionStorage.removeItem(name);
      if (!isOpen) throw error;
      await pause(error, count, waits);
    }
  }
}
