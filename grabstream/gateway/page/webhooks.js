// Webhooks: the subscriptions, what each has not delivered, and the actions that repair it.

import { get, newKey, part, poll, send } from "./api.js";
import { ask } from "./dialog.js";
import { card, h, put, say, show, table, tiles } from "./dom.js";
import { ago, count, counted, moment } from "./format.js";

const change = (method, path, body) => send(method, path, body, newKey());

/** Each action: how it is sent, when it may be done, and what it will do in words. */
const ACTIONS = {
  pause: {
    title: "Pause", send: (path) => change("PATCH", path, { state: "paused" }), may: (row) => row.state === "active",
    will: (row) => [`No more events are sent to ${row.url}.`, "Events from then on wait, and are sent when the webhook is resumed."],
  },
  resume: {
    title: "Resume", send: (path) => change("PATCH", path, { state: "active" }), may: (row) => row.state === "paused",
    will: (row) => [
      row.reason ? `The system has paused it: ${row.reason}` : "",
      `${row.waiting ? counted(row.waiting, "event") : "No event"} waits now. All events since it was paused are sent, those of an offer in their order.`,
      row.parked ? `${counted(row.parked, "parked event")} stay parked until they are sent again.` : "",
    ].filter(Boolean),
  },
  resend: {
    title: "Send again", send: (path) => change("POST", `${path}/resend`, {}), may: (row) => row.parked > 0,
    will: (row) => [
      `${counted(row.parked, "parked event")} are sent again, those of an offer in their order.`,
      "Events that wait after they failed are sent at once, too.",
      "An event that the receiver had accepted nevertheless is sent with the same webhook-id.",
      row.state === "paused" ? "The webhook is paused: they are sent when it is resumed." : "",
    ].filter(Boolean),
  },
};

const wanted = (row) => `${row.types.length ? row.types.join(", ") : "all events"}${row.offers.length ? ` of ${row.offers.join(", ")}` : ""}`;

export function webhooks({ id, signal, report }) {
  const numbers = tiles({ webhooks: "Webhooks", webhooks_paused: "Paused", webhooks_waiting: "Events that wait", webhooks_parked: "Parked events" });
  const note = h("p", { class: "note", role: "status", hidden: true });
  const scope = h("p", { class: "note", hidden: true }, "Webhooks need an API key with the scope operate.");
  const rows = new Map();
  const again = { list: () => {}, deliveries: () => {} };
  let refresh = null;

  function done(text) {
    say(note, text);
    show(note, true);
    again.list();
    again.deliveries();
  }

  function act(name, webhook) {
    const action = ACTIONS[name];
    refresh = ask({
      title: `${action.title}: ${webhook}`,
      button: action.title,
      // While the dialog is open, events continue: the preview uses the newest numbers.
      preview: () => (rows.has(webhook) ? action.will(rows.get(webhook)) : ["The webhook was removed."]),
      may: () => rows.has(webhook),
      run: () => action.send(`/v1/webhooks/${part(webhook)}`),
      done: (answer) => done(answer.resent === undefined ? `${webhook} is ${answer.state}.` : `${counted(answer.resent, "event")} of ${webhook} will be sent again.`),
      closed: () => (refresh = null),
    });
  }

  function buttons(cell, row) {
    const group = cell.firstElementChild ?? cell.appendChild(h("div", { class: "actions", role: "group", "aria-label": `Actions of ${row.webhook}` },
      Object.entries(ACTIONS).map(([name, action]) => h("button", { type: "button", "data-action": name, on: { click: () => act(name, row.webhook) } }, action.title))));
    for (const button of group.children) show(button, ACTIONS[button.dataset.action].may(row));
  }

  const list = table("Webhooks", [
    { title: "Webhook", head: true, cell: (row) => h("a", { href: `#/webhooks/${part(row.webhook)}` }, row.webhook) },
    { title: "State", wrap: true, cell: (row) => h("span", {}, h("span", { class: `badge ${row.state === "active" ? "good" : "warn"}` }, row.state), row.reason ? ` ${row.reason}` : "") },
    { title: "Sends", wrap: true, cell: (row) => h("span", {}, wanted(row), " to ", h("span", { class: "mono" }, row.url)) },
    { title: "Delivered", number: true, cell: (row) => h("span", { "data-webhook": "delivered" }, count(row.delivered)) },
    { title: "Last", cell: (row) => (row.delivered_at ? ago(row.delivered_at, row.now) : "–") },
    { title: "Waiting", number: true, cell: (row) => h("span", { "data-webhook": "waiting" }, count(row.waiting)) },
    { title: "Parked", number: true, cell: (row) => h("span", { "data-webhook": "parked", class: row.parked ? "bad" : null }, count(row.parked)) },
    { title: "Actions", cell: (row, cell) => buttons(cell, row) },
  ], (row) => row.webhook, "There are no webhooks: `grabstream webhooks add URL` makes one.");

  function giveUp(row) {
    ask({
      title: `Give up ${row.event}: ${id}`, button: "Give up", danger: true, sure: row.event,
      preview: () => [
        `${row.event} (${row.type} of ${row.offer}) is never sent to this webhook. Its receiver will lack it.`,
        row.events > 1 ? `${counted(row.events - 1, "event")} of the offer after it stay parked until they are sent again.` : "",
      ].filter(Boolean),
      run: () => change("POST", `/v1/webhooks/${part(id)}/discard`, { event: row.event }),
      done: (answer) => done(answer.discarded ? `${answer.event} will not be sent to ${id}.` : `${answer.event} had been delivered, or given up before.`),
    });
  }

  function giveUpButton(cell, row) {
    cell.row = row;
    const button = cell.firstElementChild ?? cell.appendChild(h("button", { type: "button", on: { click: () => giveUp(cell.row) } }, "Give up"));
    show(button, row.state === "parked");
  }

  const deliveries = table("Not delivered", [
    { title: "Offer", head: true, cell: (row) => h("a", { href: `#/offers/${part(row.offer)}` }, row.offer) },
    { title: "State", cell: (row) => h("span", { class: `badge ${row.state === "parked" ? "bad" : ""}`.trim() }, row.state) },
    { title: "Events", number: true, cell: (row) => count(row.events) },
    { title: "First", wrap: true, cell: (row) => `${row.event}, ${row.type}` },
    { title: "Of (UTC)", cell: (row) => moment(row.at) },
    { title: "Attempts", number: true, cell: (row) => count(row.attempts) },
    { title: "Last answer", wrap: true, cell: (row) => row.problem ?? "–" },
    { title: "Next attempt (UTC)", cell: (row) => (row.state === "parked" ? "–" : moment(row.due_at)) },
    { title: "Actions", cell: (row, cell) => giveUpButton(cell, row) },
  ], (row) => `${row.state} ${row.offer}`, "All events are delivered.");

  const seen = h("div", { class: "view" },
    numbers.element,
    id ? card("Not delivered, by offer", deliveries.element, { flush: true }) : null,
    card("All webhooks", list.element, { flush: true }));

  again.list = poll(async (until) => {
    let found;
    try {
      found = await get("/v1/webhooks", until);
    } catch (error) {
      if (error.status !== 403) throw error;
      // Webhooks that this key may not see are not mentioned, not even that there are none.
      show(scope, true);
      show(seen, false);
      return;
    }
    show(scope, false);
    show(seen, true);
    rows.clear();
    for (const row of found.webhooks) rows.set(row.webhook, row);
    list.update(found.webhooks.map((row) => ({ ...row, now: found.at })));
    const sum = (name) => found.webhooks.reduce((all, row) => all + row[name], 0);
    const paused = found.webhooks.filter((row) => row.state === "paused").length;
    numbers.set.webhooks(count(found.webhooks.length));
    numbers.set.webhooks_paused(count(paused), "", paused ? "warn" : "");
    numbers.set.webhooks_waiting(count(sum("waiting")));
    numbers.set.webhooks_parked(count(sum("parked")), sum("parked") ? "until they are sent again" : "no event is parked", sum("parked") ? "bad" : "");
    refresh?.();
  }, 3000, signal, report);
  if (id) {
    again.deliveries = poll(async (until) => {
      try {
        deliveries.update((await get(`/v1/webhooks/${part(id)}/deliveries`, until)).deliveries);
      } catch (error) {
        if (error.status !== 403) throw error;
        deliveries.update([]);
      }
    }, 3000, signal, report);
  }
  put(note, "aria-live", "polite");

  return h("div", { class: "view" },
    h("div", { class: "head" }, h("div", {}, h("h1", {}, id || "Webhooks"))),
    scope,
    note,
    seen);
}
