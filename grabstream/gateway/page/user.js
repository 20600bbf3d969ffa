// User: what a user has, their grabs, and the story of one offer.

import { get, part, poll } from "./api.js";
import { card, h, keyed, orMissing, put, say, show, table } from "./dom.js";
import { amount, clock, count, counted, digitsOf, length, moment, unit, words } from "./format.js";
import { href } from "./overview.js";

const STATES = { held: "warn", waiting: "accent", confirmed: "good", granted: "good", released: "", expired: "", returned: "" };

export function user({ id, query, signal, report }) {
  if (!id) return ask();
  const offer = query.get("offer") ?? "";
  const missing = h("p", { class: "note", hidden: true });
  const balances = table("Balances", [
    { title: "Asset", head: true, wrap: true, cell: (row) => row.asset },
    { title: "Available", number: true, cell: (row) => amount(row.available, row.asset) },
    { title: "Held", number: true, cell: (row) => amount(row.held, row.asset) },
  ], (row) => row.asset, "The user has no balances.");
  const grabs = table("Grabs, the newest first", [
    { title: "Offer", head: true, wrap: true, cell: (row, cell) => {
      if (!cell.firstChild) cell.append(h("a", { href: href("offers", row.offer) }, row.offer));
    } },
    { title: "State", cell: (row) => h("span", { class: `badge ${STATES[row.state]}` }, row.state) },
    { title: "Amount", number: true, cell: (row) => `${amount(row.amount, row.asset)} ${digitsOf(row.asset) ? unit(row.asset) : ""}`.trim() },
    { title: "Place", number: true, cell: (row) => count(row.place) },
    { title: "At (UTC)", cell: (row) => moment(row.at) },
    { title: "Story", cell: (row, cell) => {
      if (!cell.firstChild) cell.append(h("a", { href: href("users", id, `?offer=${part(row.offer)}`), "aria-label": `Why: the story of ${row.offer}` }, "Why?"));
    } },
  ], (row) => `${row.offer} ${row.grab}`, "The user has no grabs.");
  const more = h("p", { class: "soft small empty", hidden: true }, "The 100 newest are shown.");

  poll(async (until) => {
    const [has, got] = await Promise.all([
      get(`/v1/users/${part(id)}/balances?limit=100`, until), get(`/v1/users/${part(id)}/grabs?limit=100`, until)]);
    balances.update(has.balances);
    grabs.update(got.grabs);
    show(more, got.next);
  }, 3000, signal, report);

  const field = h("input", { name: "offer", value: offer, maxlength: 64, required: true, pattern: "[A-Za-z0-9._:\\-]+", autocomplete: "off", spellcheck: "false" });
  const why = h("form", { class: "inline-form", on: { submit(event) {
    event.preventDefault();
    location.hash = href("users", id, `?offer=${part(field.value.trim())}`);
  } } }, h("label", {}, "Offer", field), h("button", { class: "main" }, "Tell the story"));

  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, h("h1", {}, id), h("p", { class: "tags" }, "User")), h("div", { class: "actions" }, why)),
    missing,
    offer && story(id, offer, missing, signal, report),
    h("div", { class: "grid wide-left" },
      card("Grabs", [grabs.element, more], { flush: true, kind: "tall" }),
      card("Balances", balances.element, { flush: true })));
}

function ask() {
  const name = h("input", { name: "user", maxlength: 64, required: true, pattern: "[A-Za-z0-9._:\\-]+", autocomplete: "off", spellcheck: "false" });
  const offer = h("input", { name: "offer", maxlength: 64, pattern: "[A-Za-z0-9._:\\-]*", autocomplete: "off", spellcheck: "false" });
  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, h("h1", {}, "User"), h("p", { class: "soft" }, "What a user has, and why: everything that happened between a user and an offer."))),
    card("Find a user", h("form", { class: "inline-form", on: { submit(event) {
      event.preventDefault();
      location.hash = href("users", name.value.trim(), offer.value.trim() ? `?offer=${part(offer.value.trim())}` : "");
    } } }, h("label", {}, "Id of the user", name), h("label", {}, "Offer (optional)", offer), h("button", { class: "main" }, "Show"))));
}

/** The story of a user and an offer, moment by moment. */
function story(id, offer, missing, signal, report) {
  const list = h("ol", { class: "story" });
  const about = h("p", { class: "soft small about" });
  const state = h("span", { class: "badge" }, "…");
  const ledger = table("In the ledger", [
    { title: "Event", head: true, cell: (row) => count(row.seq) },
    { title: "Amount", number: true, cell: (row) => amount(row.amount, row.asset) },
    { title: "From", wrap: true, cell: (row) => row.debit },
    { title: "To", wrap: true, cell: (row) => row.credit },
  ], (row) => `${row.seq} ${row.leg}`, "There are no transfers.");
  poll(async (until) => {
    const found = await orMissing(get(`/v1/users/${part(id)}/why?offer=${part(offer)}`, until), missing);
    if (found === null) return;
    say(state, found.state);
    put(state, "class", `badge ${found.state === "open" ? "good" : ""}`);
    const unkept = found.refusals_of_offer - found.refusals_kept;
    const tries = found.story.some((one) => one.refused || one.grab);
    say(about, [
      `Times are relative to the opening, ${moment(found.opens_at)} UTC.`,
      tries ? "" : `No attempt of ${id} is known.`,
      unkept > 0 ? `${counted(unkept, "refusal")} of this offer are not kept one by one; some may be of this user.` : "",
      ...found.not_in_ledger.map((one) => `Event ${count(one.seq)} is not booked: ${one.because}.`),
      found.redis.problem ?? "",
    ].filter(Boolean).join(" "));
    const times = new Map();
    const keys = new Map(found.story.map((one) => {
      const key = `${one.at} ${one.what} ${one.command} ${one.grab ?? ""}`;
      times.set(key, (times.get(key) ?? 0) + 1);
      return [one, `${key} ${times.get(key)}`];
    }));
    keyed(list, found.story, (one) => keys.get(one),
      (one) => h("li", { class: one.refused ? "refused" : one.grab ? "" : "of-offer" },
        h("span", { class: "when", title: clock(one.at) }, relative(one.since_opening_ms)),
        h("span", { class: "mark", "aria-hidden": "true" }),
        h("div", { class: "what" }, h("strong", {}, `${one.refused ? "Refused: " : ""}${sentence(one.what)}`), [...detailsOf(one, found)].map((text) => h("p", {}, text)))));
    ledger.update(found.ledger);
  }, 5000, signal, report);
  return h("div", { class: "grid wide-left" },
    card(`Why: ${offer}`, [about, list], { flush: true, end: [state, h("a", { href: href("offers", offer) }, "Offer")] }),
    card("In the ledger", ledger.element, { flush: true }));
}

const relative = (ms) => `${ms < 0 ? "−" : "+"}${length(ms)}`;

function sentence(what) {
  const text = words(what);
  return text[0].toUpperCase() + text.slice(1);
}

/** The details of a moment, in words. */
function* detailsOf(one, found) {
  const of = one.details;
  const asset = of.asset ?? "";
  if (of.amount && one.what.startsWith("grab.")) yield `${amount(of.amount, asset)} ${digitsOf(asset) ? asset : of.amount === 1 ? "piece" : "pieces"}`;
  if (one.what === "grab.granted" || one.what === "grab.held") yield `place ${count(of.place)}, ${counted(of.left, found.kind === "envelope" ? "part" : "unit")} left after it`;
  if (of.asked) yield `asked for ${count(of.asked)}`;
  if (of.deadline_at) yield `to be confirmed by ${relative(of.deadline_at - found.opens_at)}${of.due ? `, ${amount(of.due, of.currency)} ${of.currency} are due` : ""}`;
  if (of.paid) yield `paid ${amount(of.paid, of.currency)} ${of.currency}${of.payment ? ` by ${of.payment}` : ""}`;
  for (const [payment, back] of of.refunds ?? []) yield `${amount(back, of.currency)} ${of.currency} go back to payment ${payment}`;
  if (of.codes_voided) yield `codes voided: ${count(of.codes_voided)}`;
  if (of.reason) yield `reason: ${words(String(of.reason))}`;
  if (one.late_ms !== undefined) yield `${length(one.late_ms)} ${one.late_ms >= 0 ? "after" : "before"} ${one.late_behind}`;
  if (of.units_left !== undefined) yield `${counted(of.units_left, "unit")} left`;
  if (of.limit_name && !one.limits.length) yield `limit ${of.limit_name}: ${count(of.limit_left ?? 0)} left`;
  if (of.retry_at && one.what !== "not_open_yet") yield `accepted again from ${relative(of.retry_at - found.opens_at)}`;
  for (const limit of one.limits) {
    yield `limit by ${limit.by} per ${limit.per}${limit.scope === "campaign" ? " of the campaign" : ""} (${limit.value}): ${
      limit.before === limit.after ? `${count(limit.before)} used` : `${count(limit.before)} before, ${count(limit.after)} after`}, of ${count(limit.max)}`;
  }
  if (of.message) yield String(of.message);
  if (of.operator) yield `by ${of.operator}`;
}
