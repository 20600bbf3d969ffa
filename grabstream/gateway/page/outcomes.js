// Refusals in words for the person who grabs: what, and until when.

import { now } from "./api.js";
import { amount, count, local, unit } from "./format.js";

const PERIODS = { hour: "an hour", day: "a day", week: "a week", offer: "in all", campaign: "in all" };

function limit(problem) {
  const reached = problem.limit;
  if (!reached) return "You have as much as one person may have.";
  if (reached.by === "grab") return "This hold cannot be extended any more.";
  const whose = reached.by === "user" ? "one person" : `one ${reached.by}`;
  const some = reached.left ? ` You may still get ${count(reached.left)}.` : "";
  const again = reached.resets_at ? ` From ${local(reached.resets_at, now())} on, you can grab again.` : "";
  return `That is the limit: ${whose} gets at most ${count(reached.max)} ${PERIODS[reached.per] ?? `per ${reached.per}`}.${some}${again}`;
}

const WORDS = {
  already_taken: (problem, row) => (problem.amount === undefined || !row
    ? "You have opened one already. Everybody gets one."
    : `You have opened one already, with ${amount(problem.amount, row.asset)} ${unit(row.asset)}. Everybody gets one.`),
  not_open_yet: (problem) => (problem.retry_at ? `Not yet: this opens at ${local(problem.retry_at, now())}.` : "Not yet: this is still being prepared. Nobody knows until when."),
  on_hold: () => "This is paused for now. It may go on; nobody knows when.",
  over: () => "This has ended, for good.",
  not_eligible: () => "This is for invited people only, and you are not on the list.",
  limit_reached: limit,
  sold_out: () => "All gone. Somebody was faster. Units may come back, but nobody knows.",
  not_enough_left: (problem) => (problem.left === undefined ? "Fewer than that are left. Try a smaller number." : `Only ${count(problem.left)} are left. Try a smaller number.`),
  expired: () => "Too late: the time of your hold is over, and it went to others.",
  not_held: () => "This is not on hold any more.",
  no_such_grab: () => "This is not yours any more.",
  no_such_offer: () => "There is no such offer.",
  conflict: () => "Something else was sent before. Please try again.",
  invalid: (problem) => `The gateway did not understand this: ${problem.detail}`,
};

/** A refusal in words. */
export function inWords(error, row) {
  if (error.status === 401) return "Please sign in again: your token is not valid any more.";
  const found = WORDS[error.problem?.outcome];
  return found ? found(error.problem, row) : error.message;
}
