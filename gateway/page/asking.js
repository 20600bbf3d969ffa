// Commands of a visitor. Each has one Idempotency-Key, which the tab keeps until it is answered: after a lost
// answer, also after the page was loaded again, the same command is sent, and nothing is taken twice.

import { Refused, Unreachable, newKey, send } from "./api.js";

const PAUSE_MS = 1000;
const PAUSE_MS_MAX = 15000;

const nameOf = (user, path) => `grabstream.command ${user} ${path}`;

/** The command to this path that has no answer yet, or null. */
export function unanswered(user, path) {
  try {
    return JSON.parse(sessionStorage.getItem(nameOf(user, path)));
  } catch {
    return null; // not written by this page
  }
}

/** Whether nobody knows if the command was carried out, or it was not, and a repeat may help. */
const isOpen = (error) => error instanceof Unreachable || (error instanceof Refused && (error.status === 429 || error.status >= 500));

/**
 * Sends a command until it is answered, and returns the answer; raises Refused. `waits(error, ms, now)` hears
 * when an answer is missing, after how long it is sent again, and gets a function that does so now.
 */
export async function command(user, path, body, waits) {
  const name = nameOf(user, path);
  const kept = unanswered(user, path) ?? { key: newKey(), body };
  sessionStorage.setItem(name, JSON.stringify(kept));
  for (let attempt = 0; ; attempt += 1) {
    try {
      const answer = await send("POST", path, kept.body, kept.key);
      sessionStorage.removeItem(name);
      return answer;
    } catch (error) {
      if (!isOpen(error)) {
        // Without valid credentials nothing was decided: the command waits for the next ones.
        if (error.status !== 401) sessionStorage.removeItem(name);
        throw error;
      }
      const pause = Math.max(error.retryAfterMs ?? 0, Math.min(PAUSE_MS * 2 ** attempt, PAUSE_MS_MAX));
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, pause);
        waits(error, pause, () => {
          clearTimeout(timer);
          resolve();
        });
      });
    }
  }
}
