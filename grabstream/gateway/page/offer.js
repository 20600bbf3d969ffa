// Offer: what it has given to whom, and what an operator may do with it.

import { get, part, poll } from "./api.js";
import { against, areas, bar, legend } from "./charts.js";
import { card, h, keyed, orMissing, put, say, show, table, tiles } from "./dom.js";
import { actions } from "./actions.js";
import { amount, clock, count, counted, digitsOf, length, moment, unit, words } from "./format.js";
import { STATES, href, leftOf, sharesOf } from "./overview.js";

export function offer({ id, signal, report }) {
  if (!id) return ask();
  const heading = h("h1", {}, id);
  const tags = h("p", { class: "tags" });
  const missing = h("p", { class: "note", hidden: true });
  const numbers = tiles({ total: "Total", given: "Taken", held: "Held", left: "Left", refunded: "Gone back", waiting: "Waiting" });
  const shares = bar([1, 2, 6]);
  const names = legend();
  const terms = h("dl", { class: "terms" });
  const doable = actions(id);

  const limits = table("Limits", [
    { title: "By", head: true, cell: (row) => row.by },
    { title: "Per", cell: (row) => row.per },
    { title: "Of", cell: (row) => row.scope ?? "offer" },
    { title: "At most", number: true, cell: (row) => count(row.max) },
  ], (row) => `${row.by} ${row.per} ${row.scope}`, "The offer has no limits.");
  const grabRow = (title, nothing) => table(title, [
    { title: "Place", number: true, cell: (row) => count(row.place) },
    { title: "User", head: true, wrap: true, cell: (row, cell) => {
      if (!cell.firstChild) cell.append(h("a", { href: href("users", row.user, `?offer=${part(id)}`) }, row.user));
    } },
    { title: "Amount", number: true, cell: (row) => amount(row.amount, row.asset) },
    { title: "State", cell: (row) => row.state },
  ], (row) => `${row.user} ${row.grab}`, nothing);
  const luckiest = grabRow("The luckiest", "No one has a unit yet.");
  const waiting = table("Waiting list", [
    { title: "Position", number: true, cell: (row) => count(row.position) },
    { title: "User", head: true, wrap: true, cell: (row, cell) => {
      if (!cell.firstChild) cell.append(h("a", { href: href("users", row.user, `?offer=${part(id)}`) }, row.user));
    } },
    { title: "Units", number: true, cell: (row) => count(row.quantity) },
    { title: "Since (UTC)", cell: (row) => moment(row.at) },
  ], (row) => `${row.user} ${row.grab}`, "The waiting list is empty.");
  const waitingMore = h("p", { class: "empty soft small", hidden: true }, "The first 100 are shown.");
  const refusals = table("Refusals", [
    { title: "Outcome", head: true, cell: (row) => words(row.outcome) },
    { title: "Refusals", number: true, cell: (row) => count(row.refusals) },
  ], (row) => row.outcome, "There are no refusals.");

  const ofEnvelopes = card("The luckiest", luckiest.element, { flush: true });
  const ofPieces = h("div", { class: "grid stack" },
    card("Limits", limits.element, { flush: true }),
    card("Waiting list", [waiting.element, waitingMore], { flush: true, kind: "tall" }));

  const again = poll(async (until) => {
    const row = await orMissing(get(`/v1/offers/${part(id)}`, until), missing);
    if (row === null) return;
    showOffer(row);
    const [lucky, queue, refused] = await Promise.all([
      get(`/v1/offers/${part(id)}/grabs?order=luckiest&limit=5`, until),
      get(`/v1/offers/${part(id)}/waiting?limit=100`, until),
      get(`/v1/offers/${part(id)}/demand`, until),
    ]);
    luckiest.update(lucky.grabs);
    waiting.update(queue.waiting);
    show(waitingMore, queue.next);
    refusals.update(Object.entries(refused.refusals).map(([outcome, number]) => ({ outcome, refusals: number })));
  }, 2000, signal, report);
  doable.done(() => again());
  const film = filmOf(id, signal, report);
  const fair = fairnessOf(id, signal, report);

  function showOffer(row) {
    say(heading, row.title || row.offer);
    const state = h("span", { class: `badge ${STATES[row.state]}` }, row.state);
    const texts = [row.title ? row.offer : "", row.kind, `by ${row.issuer}`, unit(row.asset)].filter(Boolean);
    const key = JSON.stringify([row.state, texts]);
    if (tags.dataset.key !== key) {
      tags.dataset.key = key;
      tags.replaceChildren(state, ...texts.map((text) => h("span", {}, text)));
    }
    const of = sharesOf(row);
    const share = (value) => (row.total ? `${Math.round((1000 * value) / row.total) / 10} %` : "");
    numbers.set.total(of.total, row.kind === "envelope" ? counted(row.units, "part") : unit(row.asset));
    numbers.set.given(of.given, share(row.given));
    numbers.set.held(of.held, share(row.held));
    // Units that came back without their codes, which users have seen: they are in the offer, but cannot be
    // taken.
    const uncoded = row.amount_left - row.units_left;
    numbers.set.left(of.left, row.kind === "envelope" ? counted(row.units_left, "part")
      : uncoded ? `and ${counted(uncoded, "unit")} without code` : share(row.units_left));
    numbers.set.refunded(of.refunded, share(row.refunded));
    numbers.set.waiting(count(row.waiting), counted(row.grabs, "grab"));
    shares.update([row.given, row.held, row.refunded], row.total, `${of.given} taken, ${of.held} held, ${of.refunded} gone back, ${of.left} left of ${of.total}`);
    names.update([{ name: "taken", colour: 1 }, { name: "held", colour: 2 }, { name: "gone back", colour: 6 }, { name: "left", colour: 0 }]);
    show(ofEnvelopes, row.kind === "envelope");
    show(ofPieces, row.kind !== "envelope");
    limits.update(row.terms.limits ?? []);
    keyed(terms, [...termsOf(row)].flatMap(([name, value]) => [{ name, part: "dt", text: name }, { name, part: "dd", text: value }]),
      (one) => `${one.name} ${one.part}`, (one) => h(one.part), (node, one) => say(node, one.text));
    doable.update(row);
  }

  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, heading, tags), doable.element),
    missing,
    numbers.element,
    card("Shares", [shares.element, names.element], { kind: "shares" }),
    film,
    fair,
    h("div", { class: "grid two" },
      h("div", { class: "grid stack" }, ofEnvelopes, ofPieces, card("Refusals", refusals.element, { flush: true })),
      card("Terms", terms)));
}

/** The offer through time: its shares as areas, and the grabs until the time of the slider. */
function filmOf(id, signal, report) {
  const chart = areas("Taken, held and gone back since the opening", [1, 2, 6]);
  const slider = h("input", { type: "range", min: 0, max: 0, value: 0, step: 1 });
  const now = h("button", { type: "button", disabled: true }, "Follow");
  const when = h("p", { class: "small soft" });
  const values = Object.fromEntries(["given", "held", "left", "waiting"].map((name) => [name, h("b", { "data-film": name }, "–")]));
  const names = h("ul", { class: "legend" },
    [["given", "taken", 1], ["held", "held", 2], ["left", "left", 0], ["waiting", "waiting", null]].map(([name, label, colour]) =>
      h("li", {}, colour !== null && h("span", { class: `swatch t${colour}`, "aria-hidden": "true" }), h("span", {}, label), values[name])));
  const grabs = table("Who got what, the newest first", [
    { title: "At (UTC)", cell: (row) => clock(row.at) },
    { title: "Place", number: true, cell: (row) => count(row.place) },
    { title: "User", head: true, wrap: true, cell: (row, cell) => {
      if (!cell.firstChild) cell.append(h("a", { href: href("users", row.user, `?offer=${part(id)}`) }, row.user));
    } },
    { title: "Outcome", cell: (row) => row.outcome },
    { title: "Amount", number: true, cell: (row) => amount(row.amount, row.asset) },
    { title: "Left after it", number: true, cell: (row) => count(row.left) },
  ], (row) => row.seq, "No one had a unit yet.");

  let frames = [];
  let following = true;

  /** The place of a time in the chart, from 0 to 1. The last one is before 1, so that its changes can be seen. */
  function placeOf(at) {
    const [first, last] = [frames[0].at, frames.at(-1).at];
    return last > first ? (at - first) / (last - first) / 1.02 : 1;
  }

  function place(film) {
    const at = film.now;
    say(values.given, amount(at.given, film.asset));
    say(values.held, amount(at.held, film.asset));
    say(values.left, amount(leftOf(film.kind, at), film.asset));
    say(values.waiting, count(at.waiting));
    grabs.update(film.grabs.slice(0, 12));
    const text = `${moment(at.at)} UTC, ${at.state}`;
    say(when, following ? `Until now: the last event is of ${text}.` : `As it was at ${text}.`);
    put(slider, "aria-valuetext", text);
  }
  function move() {
    chart.at(placeOf(frames[Number(slider.value)].at));
    now.disabled = following;
  }
  function whole(film) {
    frames = film.frames;
    const points = frames.map((frame) => ({ x: placeOf(frame.at), values: [frame.given, frame.held, frame.refunded] }));
    const below = [clock(frames[0].at), clock(frames.at(-1).at)];
    chart.update(points, Math.max(...frames.map((frame) => frame.total)) / 10 ** digitsOf(film.asset), below, 10 ** digitsOf(film.asset));
    put(slider, "max", frames.length - 1);
    slider.value = frames.length - 1;
    place(film);
    move();
  }

  const again = poll(async (until) => {
    if (!following) return;
    let film;
    try {
      film = await get(`/v1/offers/${part(id)}/film`, until);
    } catch (error) {
      if (error.status === 404) return;
      throw error;
    }
    if (following) whole(film);
  }, 3000, signal, report);

  let asked = 0;
  let timer = 0;
  slider.addEventListener("input", () => {
    if (!frames.length) return;
    following = Number(slider.value) === frames.length - 1;
    move();
    const number = ++asked;
    clearTimeout(timer);
    timer = setTimeout(async () => {
      try {
        const film = await get(`/v1/offers/${part(id)}/film?at=${frames[Number(slider.value)].at}`, signal);
        report(null, slider);
        // A later move has its own answer.
        if (number === asked) place(film);
      } catch (error) {
        if (!signal.aborted) report(error, slider);
      }
    }, 120);
  });
  now.addEventListener("click", () => {
    following = true;
    asked += 1;
    clearTimeout(timer);
    slider.focus();
    again();
  });
  signal.addEventListener("abort", () => clearTimeout(timer));

  return card("Film", [when, chart.element,
    h("div", { class: "film-controls" }, h("label", {}, h("span", { class: "hidden-text" }, "Time"), slider), now),
    names, grabs.element], { kind: "film" });
}

/** How the parts of an envelope are distributed, against its law. Nothing for other kinds. */
function fairnessOf(id, signal, report) {
  const distribution = against("Number of parts by size, against the law");
  const distributionNames = legend();
  const byPlace = against("Mean part by place, against the mean of the law");
  const byPlaceNames = legend();
  const summary = h("p", { class: "soft small" });
  const element = h("div", { class: "grid two", hidden: true },
    card("Distribution of parts", [distribution.element, distributionNames.element]),
    card("Fairness by place", [byPlace.element, byPlaceNames.element, summary]));
  poll(async (until) => {
    let found;
    try {
      found = await get(`/v1/offers/${part(id)}/fairness`, until);
    } catch (error) {
      if (error.status === 404) return;
      throw error;
    }
    const isMeasured = found.law !== undefined && found.places.length > 0;
    show(element, isMeasured);
    if (!isMeasured) return;
    const one = 10 ** digitsOf(found.asset);
    distribution.update(found.bins.map((bin) => bin.grabs), "expected" in found.bins[0] ? found.bins.map((bin) => bin.expected) : null,
      [0, 0.5, 1].map((at) => amount(Math.round((found.bins.at(-1).most + 1) * at), found.asset)));
    distributionNames.update([{ name: "parts", colour: 2, value: found.grabs }, { name: "by the law", colour: 5, line: true, value: words(found.law) }]);
    byPlace.update(found.places.map((group) => group.mean / one), found.places.map(() => found.mean / one),
      [`place ${count(found.places[0].first)}`, `place ${count(found.places.at(-1).last)}`]);
    byPlaceNames.update([{ name: "mean part", colour: 2 }, { name: "by the law", colour: 5, line: true, value: amount(Math.round(found.mean), found.asset) }]);
    const means = found.places.map((group) => group.mean);
    say(summary, `The law gives every place the same mean. Here, groups of ${counted(found.places[0].grabs, "place")} got from ${amount(Math.round(Math.min(...means)), found.asset)} to ${amount(Math.round(Math.max(...means)), found.asset)} on average.`);
  }, 6000, signal, report);
  return element;
}

const TIMES = new Set(["opens_at", "closes_at", "valid_until"]);
const OWN_PLACE = new Set(["limits", "title", "kind", "total", "issuer"]);

/** The terms in words. */
function* termsOf(row) {
  yield ["opened", `${moment(row.opened_at)} UTC`];
  yield ["opens", `${moment(row.opens_at)} UTC`];
  yield ["closes", row.closes_at ? `${moment(row.closes_at)} UTC` : "when it is closed, or empty"];
  if (row.closed_at) yield ["closed", `${moment(row.closed_at)} UTC${row.reason ? `, by ${row.reason}` : ""}`];
  if (row.retired_at) yield ["retired", `${moment(row.retired_at)} UTC`];
  yield ["shard", String(row.shard)];
  for (const [name, value] of Object.entries(row.terms)) {
    if (OWN_PLACE.has(name) || name === "opens_at" || name === "closes_at") continue;
    if (TIMES.has(name)) yield [words(name), `${moment(value)} UTC`];
    else if (name.endsWith("_ms")) yield [words(name.slice(0, -3)), length(value)];
    else if (name === "price") yield ["price", `${amount(value, row.terms.currency ?? "")} ${row.terms.currency ?? ""}`];
    else yield [words(name), typeof value === "object" ? JSON.stringify(value) : String(value)];
  }
  if (row.seed_sha256) yield ["SHA-256 of the seed", row.seed_sha256];
  if (row.seed) yield ["seed", row.seed];
}

function ask() {
  const name = h("input", { name: "offer", maxlength: 64, required: true, pattern: "[A-Za-z0-9._:\\-]+", autocomplete: "off", spellcheck: "false" });
  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, h("h1", {}, "Offer"), h("p", { class: "soft" }, "Its film, who got what, fairness, limits, and actions. The overview lists the offers."))),
    card("Find an offer", h("form", { class: "inline-form", on: { submit(event) {
      event.preventDefault();
      location.hash = href("offers", name.value.trim());
    } } }, h("label", {}, "Id of the offer", name), h("button", { class: "main" }, "Show"))));
}
