// The public page of one offer: what there is, how much is left, grabbing, and what the visitor has of it.

import { Refused, Unreachable, get, key, newKey, now, part, poll } from "./api.js";
import { Left, command, unanswered } from "./asking.js";
import { bar } from "./charts.js";
import { h, keyed, put, say, show } from "./dom.js";
import { envelope } from "./envelope.js";
import { amount, count, counted, local, remaining, unit, words } from "./format.js";
import { inWords } from "./outcomes.js";
import { isRequired, visitor } from "./visitor.js";

const OFFER_MS = 2000;
const MINE_MS = 2000;
/** How often the clock is checked; the shown time changes once a second. */
const TICK_MS = 250;
const SOON_MS = 60000;

const id = decodeURIComponent(location.pathname.split("/")[2] ?? "");
const path = `/v1/offers/${part(id)}`;
const payAt = document.documentElement.dataset.pay ?? "";

/** The offer as the gateway has it, or null; and its error. */
let offer = null;
let trouble = "";
/** The visitor's grabs of the offer, by their ids; those that were answered, and are not in the books yet. */
let mine = new Map();
const fresh = new Map();
/** What the visitor waits for: "", "asking" (an answer), "again" (the answer was lost). */
let asking = "";
let askNow = null;
/** When grabs are accepted again, if a refusal has said so. */
let notBefore = 0;
let isLoaded = false;
const never = new AbortController().signal;

// -- elements -----------------------------------------------------------------------------------------------

const picture = envelope();
const eyebrow = h("p", { class: "eyebrow" });
const heading = h("h1", {}, "Loading…");
const price = h("p", { class: "price", hidden: true });
const fill = bar([1, 2]);
const leftNumber = h("b", { "data-value": "left" });
const leftOf = h("span", { class: "soft" });
const left = h("div", { class: "left" }, h("p", { class: "left-words" }, leftNumber, leftOf), fill.element);
const countdownWords = h("span");
const countdownClock = h("span", { class: "clock", role: "timer" });
const countdown = h("p", { class: "countdown", hidden: true }, countdownWords, countdownClock);
const state = h("p", { class: "said warn", hidden: true, "data-value": "state" });
const number = h("input", { type: "number", min: 1, step: 1, value: 1, inputmode: "numeric" });
const numberLabel = h("label", { hidden: true }, "How many", number);
const button = h("button", { type: "submit", class: "main big" }, "Grab");
const said = h("p", { class: "said", role: "status", id: "said" });
const form = h("form", { class: "take", on: { submit } }, h("div", { class: "take-row" }, numberLabel, button));
const connection = h("p", { class: "note bad", role: "status", hidden: true });
const hero = h("section", { class: "card hero", "aria-labelledby": "title" },
  h("div", { class: "hero-head" }, eyebrow, heading, price), picture.element, left, countdown, state, said, form);
put(heading, "id", "title");

const entry = h("input", { autocomplete: isRequired ? "off" : "username", autocapitalize: "none", spellcheck: "false", required: true, type: isRequired ? "password" : "text", maxlength: isRequired ? 4096 : 64 });
const entryProblem = h("p", { class: "note bad", role: "alert", hidden: true });
const signIn = h("section", { class: "card sign-in", "aria-labelledby": "sign-in-title", hidden: true },
  h("h2", { id: "sign-in-title" }, isRequired ? "Sign in" : "Who are you?"),
  h("p", { class: "soft" }, isRequired ? "Paste the token that your shop gave you. This tab keeps it until it is closed, and sends it to this site only."
    : "Choose a name, and keep it: what you grab belongs to it."),
  h("form", { on: { submit(event) {
    event.preventDefault();
    const isOne = visitor.enter(entry.value.trim());
    show(entryProblem, !isOne);
    say(entryProblem, isOne ? "" : isRequired ? "This is not a token." : "A name has up to 64 letters, digits, and . _ : -");
    if (isOne) entry.value = "";
  } } },
  h("label", {}, isRequired ? "Token" : "Your name", entry), entryProblem, h("button", { class: "main" }, isRequired ? "Sign in" : "Continue")));

const mineList = h("ul", { class: "mine" });
const mineCard = h("section", { class: "card", "aria-labelledby": "mine-title", hidden: true },
  h("header", {}, h("h2", { id: "mine-title" }, "What you have")), mineList);
const announcer = h("p", { class: "hidden-text", role: "status" });

const who = document.getElementById("who");
const whoName = h("b", { "data-value": "user" });
who.append(h("span", { class: "hidden-text" }, "You are "), whoName,
  h("button", { type: "button", class: "quiet", on: { click: () => visitor.leave() } }, isRequired ? "Sign out" : "Change"));
document.getElementById("content").append(connection, hero, signIn, mineCard, announcer);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("content").focus();
});

function tell(text, tone = "") {
  say(said, text);
  put(said, "class", tone ? `said ${tone}` : "said");
}

// -- what the gateway knows ---------------------------------------------------------------------------------

const maySee = () => !isRequired || visitor.user !== null;

const readOffer = poll(async (until) => {
  if (maySee()) await freshOffer("", until);
}, OFFER_MS, never, report);

async function freshOffer(after, until) {
  try {
    const found = await get(path + after, until);
    // An answer that was on its way for longer must not take numbers back.
    if (!offer || found.grabs >= offer.grabs || after === "") offer = found;
    trouble = "";
    if (!isLoaded) setTimeout(resume);
  } catch (error) {
    if (!(error instanceof Refused) || ![400, 404].includes(error.status)) throw error;
    offer = null;
    trouble = "There is no such offer. Is the address complete?";
  }
  isLoaded = true;
  render();
}

const PENDING = new Set(["held", "waiting"]);
const isPending = () => [...mine.values(), ...fresh.values()].some((row) => PENDING.has(row.state));

let isMineRead = false;
/** The visitor has something that the books do not have yet. */
let isMineBehind = false;
document.addEventListener("visibilitychange", () => {
  // The visitor may have returned something elsewhere, which voids its codes.
  isMineRead &&= codes.size === 0;
});
const readMine = poll(async (until) => {
  // Only a hold and a place on the waiting list change without the user.
  if (visitor.user !== null && (!isMineRead || isMineBehind || isPending())) await freshMine("", until);
}, MINE_MS, never, report);

async function freshMine(after, until) {
  const user = visitor.user;
  const found = await get(`/v1/users/${part(user)}/grabs?offer=${part(id)}&limit=50${after}`, until);
  if (user !== visitor.user) return;
  for (const row of found.grabs) {
    const before = mine.get(row.grab);
    if (before?.state === "held" && row.state !== "held") announce(row);
    if (before?.state === "waiting" && row.state === "held") tell(`Your turn: ${what(row)} ${row.quantity === 1 ? "is" : "are"} on hold for you.`, "good");
    fresh.delete(row.grab);
  }
  mine = new Map(found.grabs.map((row) => [row.grab, row]));
  isMineRead = true;
  isMineBehind &&= mine.size === 0;
  render();
}

/** Rereads both, as of the event of an answer. */
async function readAfter(answer) {
  const position = answer.seq === undefined ? "" : `after=${answer.shard}-${answer.seq}`;
  try {
    await Promise.all([freshOffer(position && `?${position}`, never), freshMine(position && `&${position}`, never)]);
  } catch (error) {
    report(error, readAfter);
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
  }
}

const troubles = new Map();
function report(error, source) {
  if (error) troubles.set(source, error);
  else {
    troubles.delete(source);
    troubles.delete(readAfter);
  }
  const first = troubles.values().next().value;
  const isShown = Boolean(first) && first.status !== 401;
  show(connection, isShown);
  say(connection, isShown ? `${first.message} Trying again.` : "");
}

document.addEventListener("key-wanted", () => {
  show(entryProblem, true);
  say(entryProblem, "This token is not valid, or no longer valid.");
  key.set("");
  render();
});
document.addEventListener("key-changed", () => {
  mine = new Map();
  fresh.clear();
  isMineRead = false;
  isMineBehind = false;
  notBefore = 0;
  picture.close();
  if (!asking) tell("");
  render();
  readOffer();
  readMine();
  resume();
});

// -- grabbing -----------------------------------------------------------------------------------------------

function submit(event) {
  event.preventDefault();
  if (askNow) askNow();
  if (asking || !offer || visitor.user === null) return;
  const body = { user: visitor.user };
  if (offer.kind !== "envelope" && Number(number.value) > 1) body.quantity = Number(number.value);
  if (visitor.ticket) body.ticket = visitor.ticket;
  if (phase().waits) body.wait = true;
  grab(body);
}

/** After the page was loaded again, or the visitor is back: a command that has no answer is sent again. */
function resume() {
  const user = visitor.user;
  if (!asking && offer && user !== null && unanswered(user, `${path}/grabs`)) grab({ user });
}

async function grab(body) {
  const user = visitor.user;
  asking = "asking";
  tell(unanswered(user, `${path}/grabs`) ? "Asking for the answer to your last grab…" : "");
  render();
  try {
    const answer = await command(user, `${path}/grabs`, body, (error, ms, retry) => {
      asking = "again";
      askNow = () => {
        asking = "asking";
        askNow = null;
        retry();
        render();
      };
      tell(!unanswered(user, `${path}/grabs`)?.isUnknown
        ? `There is a crowd, and no room right now. The page asks again in ${Math.ceil(ms / 1000)} s.`
        : "The answer was lost. The page asks again: it is the same grab, so you get nothing twice.", "warn");
      render();
    });
    taken(answer, user);
  } catch (error) {
    if (error instanceof Left) tell("");
    else if (error instanceof Refused) refused(error, user);
    else throw error;
  } finally {
    asking = "";
    askNow = null;
    render();
    if (user !== visitor.user) resume();
  }
}

/** An answer as a row, as the books will have it in a moment. */
const rowOf = (answer) => ({
  grab: answer.grab ?? answer.id, offer: id, state: answer.outcome, quantity: answer.quantity ?? 1, amount: answer.amount ?? 0, asset: offer.asset,
  taken: answer.outcome === "granted" ? answer.quantity : 0, due: answer.due, currency: answer.currency, deadline_at: answer.deadline_at,
  payment_token: answer.payment_token, at: answer.at,
});

const codes = new Map();

function taken(answer, user) {
  if (user !== visitor.user) return;
  const row = rowOf(answer);
  fresh.set(row.grab, row);
  const found = answer.coupon_codes ?? (answer.coupon_code ? [answer.coupon_code] : []);
  if (found.length) codes.set(row.grab, found);
  if (answer.outcome === "waiting") tell("You are on the waiting list. What comes back goes to the list in order; keep this page open.", "good");
  else if (answer.outcome === "held") tell(`${what(row)} ${row.quantity === 1 ? "is" : "are"} on hold for you until ${local(row.deadline_at, now())}.${row.due ? " Pay until then to keep it." : ""}`, "good");
  else if (offer.kind === "envelope") {
    picture.open(amount(row.amount, offer.asset), unit(offer.asset), true);
    tell(`You got ${amount(row.amount, offer.asset)} ${unit(offer.asset)}.`, "good");
  } else tell(`You got it: ${what(row)}.`, "good");
  render();
  readAfter(answer);
}

function refused(error, user) {
  const { outcome, retry_at: at, limit } = error.problem;
  if (at && outcome === "not_open_yet") notBefore = at;
  else if (outcome === "limit_reached" && limit?.resets_at && !limit.left) notBefore = limit.resets_at;
  const isOpen = error.status !== 401 && unanswered(user, `${path}/grabs`);
  const open = " It is unknown whether your grab was decided: press again to ask. It is the same grab, so you get nothing twice.";
  tell(inWords(error, offer) + (isOpen ? open : ""), outcome === "already_taken" ? "" : "warn");
  readOffer();
  if (outcome === "already_taken") {
    isMineBehind = true;
    readMine();
  }
}

// -- what is shown ------------------------------------------------------------------------------------------

const NOUNS = { envelope: "part", coupon: "coupon", stock: "piece" };
const KINDS = { envelope: "Red envelope", coupon: "Coupon", stock: "Sale" };
const what = (row) => (offer?.kind === "envelope" ? `${amount(row.amount, row.asset)} ${unit(row.asset)}` : counted(row.quantity, NOUNS[offer?.kind] ?? "unit"));
const money = (value, currency) => `${amount(value, currency)} ${currency}`;

function all() {
  const rows = new Map([...fresh, ...mine]);
  return [...rows.values()].sort((a, b) => b.at - a.at);
}

/** What the visitor can do now: `text` in words if it is nothing, `opens` when it begins, `waits` for the list. */
function phase() {
  const at = now();
  if (offer.reason === "drained") return { text: "All gone.", isGone: true };
  if (offer.state === "closed" || offer.state === "retired" || (offer.closes_at && offer.closes_at <= at)) {
    return { text: offer.closed_at || offer.closes_at ? `This has ended, on ${local(offer.closed_at ?? offer.closes_at, at)}.` : "This has ended." };
  }
  if (offer.state === "paused") return { text: "Paused for now. It may continue; this page will show it." };
  const opens = Math.max(offer.opens_at ?? 0, notBefore);
  if (opens > at) return { opens };
  const rows = all();
  if (offer.kind === "envelope" && rows.length) return {};
  if (offer.units_left === 0) {
    if (offer.terms.waiting_list && !rows.some((row) => row.state === "waiting")) return { text: "All taken. Some may come back: those on the waiting list get them, in order.", waits: true };
    return { text: rows.length ? "" : offer.held ? "All taken. Some are only on hold, and may come back." : "All gone." , isGone: true };
  }
  return { grabs: true };
}

function render() {
  const user = visitor.user;
  show(who, user !== null);
  say(whoName, user ?? "");
  show(signIn, user === null);
  if (offer) renderOffer(user);
  else {
    say(eyebrow, "");
    say(heading, !maySee() ? "Sign in to see this offer" : trouble ? "Nothing here" : isLoaded ? "" : "Loading…");
    for (const one of [left, form, countdown, price, picture.element]) show(one, false);
    show(state, trouble !== "");
    say(state, trouble);
  }
  const rows = all();
  show(mineCard, offer !== null && rows.length > 0);
  if (offer) keyed(mineList, rows, (row) => row.grab, makeRow, updateRow);
  tick();
}

function renderOffer(user) {
  const { terms } = offer;
  say(eyebrow, `${KINDS[offer.kind] ?? words(offer.kind)} from ${offer.issuer}`);
  say(heading, offer.title || offer.offer);
  document.title = `${offer.title || offer.offer} · grabstream`;
  show(price, Boolean(terms.price));
  say(price, terms.price ? `${money(terms.price, terms.currency)} each` : "");
  show(left, true);
  const isEnvelope = offer.kind === "envelope";
  // Pieces that came back without their codes are not left, and are not taken.
  const taken = offer.units - (isEnvelope ? offer.units_left : offer.amount_left);
  say(leftNumber, `${count(offer.units_left)} left`);
  say(leftOf, `of ${counted(offer.units, NOUNS[offer.kind] ?? "unit")}${isEnvelope ? `, ${money(offer.total, offer.asset)} in all` : offer.held ? `, ${count(offer.held)} on hold` : ""}`);
  fill.update(isEnvelope ? [taken, 0] : [taken - offer.held, offer.held], offer.units, `${count(offer.units_left)} of ${count(offer.units)} left`);
  const can = phase();
  show(picture.element, isEnvelope);
  const own = all()[0];
  if (isEnvelope && own) picture.open(amount(own.amount, own.asset), unit(own.asset), false);
  else picture.update(asking ? "asked" : can.isGone || (!can.grabs && !can.opens && can.text) ? "gone" : "");
  show(state, Boolean(can.text));
  say(state, can.text ?? "");
  const most = Math.min(terms.max_per_grab ?? 1, 9999);
  show(numberLabel, !isEnvelope && most > 1 && Boolean(can.grabs || can.waits));
  put(number, "max", most);
  number.disabled = Boolean(asking);
  show(form, user !== null && Boolean(can.grabs || can.waits || can.opens || asking));
  button.disabled = Boolean(can.opens) && !asking;
  // A disabled button would lose the focus while the answer is on its way.
  put(button, "aria-disabled", asking === "asking");
  say(button, asking === "asking" ? "One moment…" : asking === "again" ? "Ask again now" : can.waits ? "Join the waiting list" : isEnvelope ? "Open it" : terms.hold_ms ? "Put it on hold for me" : "Grab");
}

/** Clocks run between answers; what a clock starts or ends is rendered when it gets there. */
let lastPhase = "";
function tick() {
  if (offer) {
    const can = phase();
    show(countdown, Boolean(can.opens));
    if (can.opens) {
      say(countdownWords, `Opens at ${local(can.opens, now())}, in`);
      say(countdownClock, remaining(can.opens - now()));
    }
    const named = JSON.stringify(can);
    if (named !== lastPhase) {
      lastPhase = named;
      renderOffer(visitor.user);
    }
  }
  for (const update of clocks.values()) update();
}
setInterval(() => {
  if (!document.hidden) tick();
}, TICK_MS);

// -- what the visitor has -----------------------------------------------------------------------------------

const STATES = {
  held: ["On hold", "accent"], waiting: ["On the waiting list", "warn"], granted: ["Yours", "good"], confirmed: ["Paid, yours", "good"],
  released: ["Given back", ""], expired: ["Time over", ""], returned: ["Returned", ""],
};
/** By grab: what brings its clock up to date. */
const clocks = new Map();
/** Grabs whose payment is on its way. */
const paying = new Set();

function announce(row) {
  if (row.state === "confirmed" || row.state === "granted") tell(`Paid: ${what(row)} ${row.quantity === 1 ? "is" : "are"} yours.`, "good");
  else if (row.state === "expired") tell("Your hold has expired, and its units went to others.", "warn");
  paying.delete(row.grab);
}

function makeRow() {
  const title = h("b");
  const badge = h("span", { class: "badge" });
  const clock = h("span", { class: "clock", role: "timer" });
  const clockWords = h("span");
  const until = h("p", { class: "until", hidden: true }, clock, clockWords);
  const codesKept = h("span");
  const codesVoid = h("s", { "data-value": "void" });
  const code = h("p", { class: "code", hidden: true }, codesKept, " ", codesVoid);
  const note = h("p", { class: "soft small", hidden: true });
  const problem = h("p", { class: "note bad", role: "alert", hidden: true });
  const buttons = h("div", { class: "buttons" });
  const node = h("li", {}, h("p", { class: "line" }, title, badge), until, code, note, buttons, problem);
  const one = { node, title, badge, clock, clockWords, until, code, codesKept, codesVoid, note, problem, row: null, isSure: false, isBusy: false };
  const act = (name, label, kind, run) => (one[name] = h("button", { type: "button", class: kind, hidden: true, "data-action": name, on: { click: () => run(one) } }, label));
  buttons.append(act("pay", "Pay", "main", pay), act("extend", "More time", "", extend), act("release", "Give it back", "quiet", release));
  node.one = one;
  return node;
}

function updateRow(node, row) {
  const { one } = node;
  one.row = row;
  const [text, tone] = STATES[row.state] ?? [words(row.state), ""];
  say(one.title, what(row));
  say(one.badge, text);
  put(one.badge, "class", tone ? `badge ${tone}` : "badge");
  const isHeld = row.state === "held";
  const isWaiting = row.state === "waiting";
  show(one.until, isHeld);
  const found = codes.get(row.grab) ?? [];
  // A return voids the codes that were given last.
  const voided = found.slice(row.taken);
  show(one.code, found.length > 0);
  say(one.codesKept, found.slice(0, row.taken).join(" "));
  say(one.codesVoid, voided.join(" "));
  const due = isHeld && row.due ? money(row.due, row.currency) : "";
  const notes = isWaiting ? `${row.position ? `${row.position === 1 ? "You are next" : `${count(row.position - 1)} before you`}, since` : "Since"} ${local(row.at, now())}. What comes back goes to the list in order.`
    : isHeld && paying.has(row.grab) ? "Paid. Waiting for the receipt…"
      : due && !(payAt && row.payment_token) ? `To pay: ${due}. Your shop says how.`
        : voided.length ? `Returned: ${counted(voided.length, "crossed-out code")} ${voided.length === 1 ? "is" : "are"} void.` : "";
  show(one.note, notes !== "");
  say(one.note, notes);
  show(one.pay, Boolean(due && payAt && row.payment_token) && !paying.has(row.grab));
  say(one.pay, `Pay ${due}`);
  show(one.extend, isHeld && Boolean(offer.terms.extensions) && !one.isExtended && !paying.has(row.grab));
  show(one.release, (isHeld && !paying.has(row.grab)) || isWaiting);
  say(one.release, one.isSure ? "Really? Press again" : isWaiting ? "Leave the list" : "Give it back");
  put(one.release, "class", one.isSure ? "danger" : "quiet");
  for (const name of ["pay", "extend", "release"]) put(one[name], "aria-disabled", one.isBusy);
  if (isHeld) clocks.set(row.grab, () => runClock(one));
  else clocks.delete(row.grab);
}

function runClock(one) {
  const { row } = one;
  const rest = row.deadline_at - now();
  say(one.clock, remaining(rest));
  say(one.clockWords, `left, until ${local(row.deadline_at, now())}`);
  put(one.until, "class", rest < SOON_MS ? "until soon" : "until");
  // A screen reader hears of it once, not each second.
  if (rest < SOON_MS && rest > 0 && one.warned !== row.deadline_at) {
    one.warned = row.deadline_at;
    say(announcer, `One minute left of your hold of ${what(row)}.`);
  }
}

/** Does something with a grab; shows its problem next to it. */
async function doing(one, run) {
  if (one.isBusy) return;
  one.isBusy = true;
  show(one.problem, false);
  render();
  try {
    await run();
  } catch (error) {
    say(one.problem, error instanceof Refused ? inWords(error, offer) : error.message);
    show(one.problem, true);
    if (error instanceof Refused) readMine();
    else if (!(error instanceof PaymentProblem || error instanceof Left)) throw error;
  } finally {
    one.isBusy = false;
    render();
  }
}

function settle(one, name) {
  const { grab } = one.row;
  return command(visitor.user, `${path}/grabs/${part(grab)}/${name}`, { user: visitor.user }, (error, ms) => {
    say(one.problem, `The answer was lost. Asking again in ${Math.ceil(ms / 1000)} s.`);
    show(one.problem, true);
  });
}

function extend(one) {
  doing(one, async () => {
    try {
      const answer = await settle(one, "extend");
      if (answer.deadline_at) tell(`You have until ${local(answer.deadline_at, now())}.`, "good");
      await readAfter(answer);
    } catch (error) {
      if (error instanceof Refused && error.problem.outcome === "limit_reached") one.isExtended = true;
      throw error;
    }
  });
}

function release(one) {
  if (!one.isSure) {
    one.isSure = true;
    one.release.addEventListener("blur", () => {
      one.isSure = false;
      render();
    }, { once: true });
    return render();
  }
  doing(one, async () => {
    const answer = await settle(one, "release");
    one.isSure = false;
    tell(one.row.state === "waiting" ? "You have left the waiting list." : "Given back. It goes to others.");
    await readAfter(answer);
  });
}

/** The payment provider does not take the payment. */
class PaymentProblem extends Error {}

/** A payment has one id for each hold, so it is made once, however often it is requested. */
function pay(one) {
  const { grab, payment_token: token } = one.row;
  const { user } = visitor;
  doing(one, async () => {
    let answer;
    let body;
    try {
      answer = await fetch(payAt, { method: "POST", headers: { "Content-Type": "application/json" }, credentials: "omit", redirect: "error",
        body: JSON.stringify({ token, payment: paymentOf(grab) }) });
      body = await answer.json();
    } catch {
      throw new PaymentProblem("The payment provider cannot be reached. Press again: it is the same payment.");
    }
    const isKnown = answer.status === 409 && String(body.reason).startsWith("payment:");
    if (!answer.ok && !isKnown) throw new PaymentProblem(`The payment provider refuses: ${body.reason}`);
    if (user !== visitor.user) return;
    paying.add(grab);
    tell("Paid. Waiting for the receipt…");
    setTimeout(readMine, 500);
  });
}

/** The id of the payment of a hold: the tab keeps it. */
function paymentOf(grab) {
  const name = `grabstream.payment ${visitor.user} ${id} ${grab}`;
  const kept = sessionStorage.getItem(name) ?? newKey();
  sessionStorage.setItem(name, kept);
  return kept;
}

render();
