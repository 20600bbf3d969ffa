// Overview: the rate of grabs, what the offers have left, and the lag of the read models.

import { get, poll } from "./api.js";
import { bar, colourOf, legend, stacked } from "./charts.js";
import { card, h, put, say, show, table, tiles } from "./dom.js";
import { ago, amount, brief, clock, count, counted, length, words } from "./format.js";

const WINDOW = 60;
const ASSETS_MAX = 50;
const KINDS = ["external", "issuer", "offer", "hold", "wallet", "redeemed", "refund", "other"];
const GIVEN = ["granted", "held", "waiting"];

export const STATES = { open: "good", paused: "warn", closed: "", retired: "" };

/** What can still be taken: the money of an envelope; of pieces, those that have codes, where the offer has codes. */
export const leftOf = (kind, of) => (kind === "envelope" ? of.amount_left : of.units_left);

/** What an offer has given, what is held, left, and gone back, in words. */
export function sharesOf(row) {
  const text = (value) => amount(value, row.asset);
  return { given: text(row.given), held: text(row.held), left: text(leftOf(row.kind, row)), refunded: text(row.refunded), total: text(row.total) };
}

/** The sums of the books by asset: of the accounts of each kind, and of all. Large ones come as BigInt. */
export function sumsByAsset(rows) {
  const byAsset = new Map();
  for (const row of rows) {
    const of = byAsset.get(row.asset) ?? { asset: row.asset, sums: {}, accounts: 0, all: 0n };
    const kind = KINDS.includes(row.kind) ? row.kind : "other";
    const sum = BigInt(row.sum);
    of.sums[kind] = (of.sums[kind] ?? 0n) + sum;
    of.accounts += row.accounts;
    of.all += sum;
    byAsset.set(row.asset, of);
  }
  return [...byAsset.values()];
}

export const href = (kind, id, query = "") => `#/${kind}/${encodeURIComponent(id)}${query}`;

export function overview({ signal, report }) {
  const numbers = tiles({ grabs: "Grabs a second", refused: "Refusals a second", open: "Open offers", behind: "Read models behind", verified: "Verified" });
  const chart = stacked("Answers to grabs in the last minute, by outcome");
  const names = legend();
  const demandNote = h("p", { class: "soft small" }, "Waiting for the first numbers.");

  const filter = h("select", { id: "state" }, h("option", { value: "" }, "All states"),
    Object.keys(STATES).map((state) => h("option", { value: state }, words(state))));
  const offers = offerTable();
  const more = h("button", { type: "button", hidden: true }, "Show more");
  let rows = 20;

  const models = table("Read models", [
    { title: "Read model", head: true, cell: (row) => row.projection },
    { title: "Events behind", number: true, cell: (row) => (row.behind === undefined ? "–" : count(row.behind)) },
    { title: "Time behind", number: true, cell: (row) => (row.behind === undefined ? "–" : row.behind ? length(row.behind_ms) : "0 s") },
    { title: "State", cell: (row) => h("span", { class: `badge ${row.stopped ? "bad" : "good"}` }, row.stopped ? `stopped in ${counted(row.stopped, "shard")}` : "runs") },
  ], (row) => row.projection, "There are no read models.");

  const verified = table("Verified to", [
    { title: "Shard", head: true, cell: (row) => String(row.shard) },
    { title: "Journal", number: true, cell: (row) => (row.journaled === undefined ? "–" : count(row.journaled)) },
    { title: "Verified to", number: true, cell: (row) => count(row.seq) },
    { title: "Compared", cell: (row) => row.at ?? "never" },
  ], (row) => row.shard, "No shard has been verified yet.");

  const sums = table("Sums of the ledger by asset and kind of account", [
    { title: "Asset", head: true, wrap: true, cell: (row) => row.asset },
    ...KINDS.map((kind) => ({ title: kind, number: true, cell: (row) => (kind in row.sums ? amount(row.sums[kind], row.asset) : "–") })),
    { title: "Accounts", number: true, cell: (row) => count(row.accounts) },
    { title: "In all", number: true, cell: (row) => h("span", { class: row.all === 0n ? "good" : "bad" }, amount(row.all, row.asset)) },
  ], (row) => row.asset, "The ledger is empty.");
  const moreAssets = h("p", { class: "empty soft small", hidden: true });
  const balanced = h("span", { class: "badge" }, "not read yet");

  poll(async (until) => {
    const found = await get(`/v1/demand?seconds=${WINDOW}`, until);
    showDemand(found);
  }, 2000, signal, report);

  const readOffers = poll(async (until) => {
    const state = filter.value ? `&state=${filter.value}` : "";
    const found = [];
    let cursor = "";
    let next;
    do {
      const page = await get(`/v1/offers?limit=${Math.min(rows - found.length, 100)}${state}${cursor}`, until);
      found.push(...page.offers);
      next = page.next;
      cursor = `&cursor=${next}`;
    } while (next && found.length < rows);
    offers.update(found);
    show(more, Boolean(next) && rows < 500);
    const open = found.filter((row) => row.state === "open").length;
    if (!filter.value) numbers.set.open(next ? `${count(open)}+` : count(open), `of ${count(found.length)}${next ? " newest" : ""}`);
  }, 2000, signal, report);
  filter.addEventListener("change", () => readOffers());
  more.addEventListener("click", () => {
    rows += 50;
    readOffers();
  });

  poll(async (until) => showSystem(await get("/v1/system", until)), 2000, signal, report);

  poll(async (until) => {
    const found = await get("/v1/books", until);
    const all = sumsByAsset(found.sums);
    sums.update(all.slice(0, ASSETS_MAX));
    show(moreAssets, all.length > ASSETS_MAX);
    say(moreAssets, `${count(ASSETS_MAX)} of ${count(all.length)} assets are shown.`);
    const wrong = all.filter((row) => row.all !== 0n);
    say(balanced, wrong.length ? `${wrong.map((row) => row.asset).join(", ")} not balanced` : "balanced");
    put(balanced, "class", `badge ${wrong.length ? "bad" : "good"}`);
  }, 10000, signal, report);

  function showDemand(found) {
    const by = new Map(found.seconds.map((one) => [one.second, one.outcomes]));
    // The last second is not over, so it is left out.
    const seconds = Array.from({ length: WINDOW - 1 }, (_, index) => found.until - WINDOW + 1 + index);
    const columns = seconds.map((second) => ({ values: by.get(second) ?? {} }));
    const totals = new Map();
    for (const outcomes of by.values()) for (const [name, number] of Object.entries(outcomes)) totals.set(name, (totals.get(name) ?? 0) + number);
    const others = [...totals.keys()].filter((name) => !GIVEN.includes(name)).sort((a, b) => totals.get(b) - totals.get(a));
    const all = [...GIVEN.filter((name) => totals.has(name)), ...others];
    chart.update(columns, all, [clock(seconds[0] * 1000), clock(seconds.at(-1) * 1000)]);
    names.update(all.map((name) => ({ name, colour: colourOf(name), value: totals.get(name) })));
    const mean = (seconds, wanted) => columns.slice(-seconds).reduce((sum, one) => sum + Object.entries(one.values).reduce((part, [name, number]) => part + (wanted(name) ? number : 0), 0), 0) / seconds;
    const isGiven = (name) => GIVEN.includes(name);
    numbers.set.grabs(brief(mean(5, isGiven)), "mean of 5 s");
    // Workers write refusals every few seconds, so the newest seconds have none yet.
    numbers.set.refused(brief(mean(15, (name) => !isGiven(name))), "mean of 15 s");
    say(demandNote, all.length ? "Units that were granted, held or queued, and refusals, second by second (UTC)." : "No answers in the last minute.");
  }

  function showSystem(found) {
    const journaled = new Map(found.shards.map((shard) => [shard.shard, shard.journaled_seq]));
    const byName = new Map();
    for (const row of found.read_models) {
      const of = byName.get(row.projection) ?? { projection: row.projection, behind: 0, behind_ms: 0, stopped: 0 };
      of.behind = row.behind === undefined || of.behind === undefined ? undefined : of.behind + row.behind;
      of.behind_ms = Math.max(of.behind_ms, row.behind_ms ?? 0);
      byName.set(row.projection, of);
    }
    for (const stop of found.stopped) if (byName.has(stop.projection)) byName.get(stop.projection).stopped += 1;
    const all = [...byName.values()];
    models.update(all);
    const isKnown = all.length && all.every((row) => row.behind !== undefined);
    const most = all.reduce((worst, row) => (row.behind_ms > worst.behind_ms ? row : worst), { behind_ms: 0 });
    const events = Math.max(0, ...all.map((row) => row.behind ?? 0));
    numbers.set.behind(isKnown ? length(most.behind_ms).replace("0 ms", "0 s") : "–", isKnown ? counted(events, "event") : "Redis does not answer",
      isKnown && most.behind_ms < 10000 ? "" : "bad");
    verified.update(found.verified.map((row) => ({ ...row, journaled: journaled.get(row.shard), at: row.at && ago(row.at, found.at) })));
    const total = found.shards.reduce((sum, shard) => sum + (shard.journaled_seq ?? 0), 0);
    const proved = found.verified.reduce((sum, row) => sum + row.seq, 0);
    const share = total ? Math.min(100, Math.floor((100 * proved) / total)) : 100;
    numbers.set.verified(found.differences.length ? counted(found.differences.length, "difference") : `${share} %`,
      `${count(proved)} of ${count(total)}`, found.differences.length ? "bad" : "");
  }

  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, h("h1", {}, "Overview"))),
    numbers.element,
    card("Answers to grabs", [demandNote, chart.element, names.element].map((one) => h("div", { class: "part" }, one))),
    card("Offers", [offers.element, more], { flush: true, kind: "offers", end: h("label", {}, h("span", { class: "hidden-text" }, "State"), filter) }),
    h("div", { class: "grid two" },
      card("Read models", models.element, { flush: true }),
      card("Verified to", verified.element, { flush: true })),
    card("Sums of the books", [sums.element, moreAssets], { flush: true, end: balanced }));
}

function offerTable() {
  return table("Offers", [
    {
      title: "Offer", head: false, cell(row, cell) {
        if (!cell.firstChild) {
          cell.append(h("div", { class: "offer-name" }, h("a", { href: href("offers", row.offer) }), h("span", { class: "soft small" })));
        }
        const [link, below] = cell.firstChild.children;
        say(link, row.title || row.offer);
        say(below, row.title ? row.offer : `${row.kind} by ${row.issuer}`);
      },
    },
    {
      title: "State", cell(row, cell) {
        if (!cell.firstChild) cell.append(h("span"));
        put(cell.firstChild, "class", `badge ${STATES[row.state]}`);
        say(cell.firstChild, row.state);
      },
    },
    {
      title: "Taken, held, left", class: "fill", cell(row, cell) {
        cell.shares ??= bar([1, 2, 6]);
        if (!cell.firstChild) cell.append(cell.shares.element, h("div", { class: "small" }, h("span", { "data-share": "given" }), h("span", { "data-share": "held" }), h("span", { "data-share": "left" })));
        const of = sharesOf(row);
        cell.shares.update([row.given, row.held, row.refunded], row.total, `${of.given} taken, ${of.held} held, ${of.left} left of ${of.total}`);
        const [given, held, left] = cell.lastChild.children;
        say(given, `${of.given} taken`);
        say(held, row.held ? `${of.held} held` : "");
        say(left, `${of.left} left`);
      },
    },
    { title: "Total", number: true, class: "optional", cell: (row) => sharesOf(row).total },
    { title: "Grabs", number: true, class: "optional", cell: (row) => count(row.grabs) },
    { title: "Waiting", number: true, class: "optional", cell: (row) => count(row.waiting) },
  ], (row) => row.offer, "There are no such offers.");
}
