// Refusals in words for visitors: what, and until when.

import { now } from "./api.js";
import { amount, count, local, unit } from "./format.js";

const PERIODS = { hour: "an hour", day: "a day", week: "a week", offer: "in all" };

function limit(problem) {
  const reached = problem.limit;
  if (!reached) return "You have as much as one person may have.";
  if (reached.by === "grab") return "This hold can no longer be extended.";
  const whose = reached.by === "user" ? "one person" : `one ${reached.by}`;
  const some = reached.left ? ` You may still get ${count(reached.left)}.` : "";
  const again = reached.resets_at ? ` From ${local(reached.resets_at, now())} on, you can grab again.` : "";
  return `That is the limit: ${whose} gets at most ${count(reached.max)} ${PERIODS[reached.per] ?? `per ${reached.per}`}.${some}${again}`;
}

const WORDS = {
  already_taken: (problem, row) => (problem.amount === undefined || !row
    ? "You have opened one already. Each person gets one."
    : `You have opened one already, with ${amount(problem.amount, row.asset)} ${unit(row.asset)}. Each person gets one.`),
  not_open_yet: (problem) => (problem.retry_at ? `Not yet: this opens at ${local(problem.retry_at, now())}.` : "Not yet: this is still being prepared. It is not known when it opens."),
  on_hold: () => "This is paused for now. It may continue; it is not known when.",
  over: () => "This has ended permanently.",
  not_eligible: () => "This is for invited people only, and you are not on the list.",
  limit_reached: limit,
  sold_out: () => "All gone. Units may come back, but that is not certain.",
  not_enough_left: (problem) => (problem.left === undefined ? "Fewer than that are left. Try a smaller number." : `Only ${count(problem.left)} are left. Try a smaller number.`),
  expired: () => "Too late: your hold has expired, and its units went to others.",
  not_held: () => "This is no longer on hold.",
  no_such_grab: () => "This is no longer yours.",
  no_such_offer: () => "There is no such offer.",
  conflict: () => "Another request was sent before. Please try again.",
  invalid: (problem) => `The gateway could not read the request: ${problem.detail}`,
};

/** A refusal in words. */
export function inWords(error, row) {
  if (error.status === 401) return "Please sign in again: your token is no longer valid.";
  const found = WORDS[error.problem?.outcome];
  return found ? found(error.problem, row) : error.message;
}
