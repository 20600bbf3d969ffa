// System: shards and their leases, differences, recoveries, and what the doctor says.

import { get, poll } from "./api.js";
import { card, h, keyed, put, say, show, table, tiles } from "./dom.js";
import { ago, count, counted, length, moment } from "./format.js";

const SEVERITY = { stuck: "bad", risk: "warn", note: "" };

const MODELS = ["ledger", "balances", "audit"];

/** The position of a read model in a shard, in words. */
function model(row) {
  if (row === undefined) return "–";
  const lag = row.behind ? ` · ${count(row.behind)} behind, ${length(row.behind_ms)}` : "";
  return h("span", { class: row.stopped ? "bad" : null }, `${count(row.seq)}${lag}${row.stopped ? " · stopped" : ""}`);
}

export function system({ signal, report }) {
  const numbers = tiles({ deciding: "Shards that decide", waiting: "Not journaled yet", stopped: "Stopped read models", differences: "Differences", recoveries: "Recoveries" });
  const redis = h("p", { class: "note bad", hidden: true });

  const shards = table("Shards", [
    { title: "Shard", head: true, cell: (row) => String(row.shard) },
    { title: "State", wrap: true, cell: (row) => h("span", {}, h("span", { class: `badge ${row.fault ? "bad" : "good"}` }, row.fault ? "fenced" : "decides"), row.fault ? ` ${row.fault}` : "") },
    { title: "Lease of", wrap: true, cell: (row) => h("span", { class: "mono" }, row.relay ?? "none") },
    { title: "Term", number: true, cell: (row) => (row.term === undefined ? "–" : count(row.term)) },
    { title: "Decided", number: true, cell: (row) => (row.seq === undefined ? "–" : count(row.seq)) },
    { title: "Journaled", number: true, cell: (row) => (row.journaled_seq === undefined ? "–" : count(row.journaled_seq)) },
    { title: "Last event", number: true, cell: (row) => (row.time ? ago(row.time, row.now) : "–") },
  ], (row) => row.shard, "Redis has no answer.");

  const models = table("Read models by shard", [
    { title: "Shard", head: true, cell: (row) => String(row.shard) },
    { title: "Journal", number: true, cell: (row) => (row.journaled === undefined ? "–" : count(row.journaled)) },
    ...MODELS.map((name) => ({ title: name, number: true, cell: (row) => model(row[name]) })),
    { title: "verified to", number: true, cell: (row) => (row.verified === undefined ? "–" : count(row.verified)) },
  ], (row) => row.shard, "There are no read models.");
  const stops = table("Stopped read models", [
    { title: "Read model", head: true, cell: (row) => `${row.projection}, shard ${row.shard}` },
    { title: "After event", number: true, cell: (row) => count(row.seq) },
    { title: "Because", wrap: true, cell: (row) => row.reason.split("\n")[0] },
    { title: "Since (UTC)", cell: (row) => moment(row.at) },
  ], (row) => `${row.projection} ${row.shard}`, "All read models run.");

  const differences = table("Differences", [
    { title: "Number", head: true, cell: (row) => String(row.id) },
    { title: "Shard", number: true, cell: (row) => String(row.shard) },
    { title: "What", wrap: true, cell: (row) => row.what },
    { title: "Found", cell: (row) => moment(row.at) },
  ], (row) => row.id, "The verifier has found no difference.");

  const recoveries = table("Recoveries", [
    { title: "At (UTC)", head: true, cell: (row) => moment(row.at) },
    { title: "Shard", number: true, cell: (row) => String(row.shard) },
    { title: "Because", wrap: true, cell: (row) => row.problem },
    { title: "Events", number: true, cell: (row) => count(row.applied) },
    { title: "Took", number: true, cell: (row) => length(row.seconds * 1000) },
  ], (row) => `${row.shard} ${row.term}`, "No shard has had to be recovered.");

  const doctorState = h("span", { class: "badge" }, "not asked yet");
  const ask = h("button", { type: "button" }, "Ask again");
  const doctorNote = h("p", { class: "empty", role: "status" }, "Asking every server…");
  const findings = h("div");
  const passed = h("ul", { class: "checks soft" });
  const details = h("details", { class: "passed", hidden: true }, h("summary", {}, "Checks that found nothing"), passed);

  poll(async (until) => {
    const found = await get("/v1/system", until);
    show(redis, found.redis);
    if (found.redis) say(redis, `Redis does not answer: ${found.redis}`);
    shards.update(found.shards.map((row) => ({ ...row, now: found.at })));
    const rows = new Map(found.shards.map((shard) => [shard.shard, { shard: shard.shard, journaled: shard.journaled_seq }]));
    const rowOf = (shard) => rows.get(shard) ?? rows.set(shard, { shard }).get(shard);
    for (const row of found.read_models) rowOf(row.shard)[row.projection] = row;
    for (const stop of found.stopped) rowOf(stop.shard)[stop.projection].stopped = true;
    for (const row of found.verified) rowOf(row.shard).verified = row.seq;
    models.update([...rows.values()]);
    stops.update(found.stopped);
    differences.update(found.differences);
    recoveries.update(found.recoveries);
    const deciding = found.shards.filter((shard) => !shard.fault).length;
    numbers.set.deciding(count(deciding), `of ${count(found.shards.length)}`, deciding === found.shards.length && deciding ? "" : "bad");
    numbers.set.waiting(count(found.shards.reduce((sum, shard) => sum + (shard.waiting ?? 0), 0)), "events in Redis only");
    numbers.set.stopped(count(found.stopped.length), found.stopped.length ? "see the doctor" : "all run", found.stopped.length ? "bad" : "");
    numbers.set.differences(count(found.differences.length), found.differences.length ? "books and journal differ" : "books and journal agree", found.differences.length ? "bad" : "");
    numbers.set.recoveries(count(found.recoveries.length), found.recoveries.length ? `last ${ago(found.recoveries[0].at, found.at)}` : "none");
  }, 2000, signal, report);

  const again = poll(async (until) => {
    ask.disabled = true;
    try {
      const found = await get("/v1/doctor", until);
      const away = found.servers.filter((server) => server.problem);
      const rows = [
        ...away.map((server) => ({ check: server.server, severity: "stuck", what: `${server.server} does not answer`, means: server.problem, command: "" })),
        ...found.findings,
      ];
      say(doctorState, found.healthy ? "healthy" : counted(rows.length, "finding"));
      put(doctorState, "class", `badge ${found.healthy ? "good" : "bad"}`);
      show(doctorNote, rows.length === 0);
      say(doctorNote, `${counted(found.passed.length, "check")}: nothing is stuck.`);
      keyed(findings, rows, (row) => `${row.check} ${row.what}`, (row) =>
        h("article", { class: "finding" },
          h("div", { class: "title" }, h("span", { class: `badge ${SEVERITY[row.severity]}` }, row.severity), h("h3", { class: "text" }, row.what)),
          h("p", { class: "soft" }, row.means), row.command && h("p", {}, h("code", {}, row.command)), h("p", { class: "soft small" })),
        (node, row) => say(node.lastChild, row.since ? `since ${moment(row.since)}, ${length(found.at - row.since)}` : ""));
      show(details, found.passed.length > 0);
      keyed(passed, found.passed, (name) => name, (name) => h("li", {}, name));
    } catch (error) {
      if (error.status !== 403) throw error;
      say(doctorState, "needs the scope operate");
      say(doctorNote, "The doctor's report needs an API key with the scope operate.");
    } finally {
      ask.disabled = false;
    }
  }, 30000, signal, report);
  ask.addEventListener("click", () => again());

  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, h("h1", {}, "System"))),
    redis,
    numbers.element,
    card("Doctor", [doctorNote, findings, details], { flush: true, end: [doctorState, ask] }),
    card("Shards", shards.element, { flush: true }),
    card("Read models by shard", models.element, { flush: true }),
    card("Stopped read models", stops.element, { flush: true }),
    h("div", { class: "grid two" },
      card("Differences", differences.element, { flush: true }),
      card("Recoveries", recoveries.element, { flush: true })));
}
