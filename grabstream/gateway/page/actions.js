// What an operator may do with an offer: each action says what it will do, asks, and is sent once.

import { newKey, part, send } from "./api.js";
import { ask } from "./dialog.js";
import { h, show } from "./dom.js";
import { amount, count, counted, moment, unit } from "./format.js";

const left = (row) => (row.kind === "envelope" ? `${amount(row.amount_left, row.asset)} ${unit(row.asset)} in ${counted(row.units_left, "part")}` : counted(row.amount_left, "unit"));

/** Each action: its name, when it may be done, and what it will do in words. */
const ACTIONS = {
  pause: {
    title: "Pause", may: (row) => row.state === "open",
    will: (row) => ["From now on, grabs are refused with “on hold”.", `${left(row)} stay in the offer.`,
      row.held ? `${counted(row.held, "unit")} on hold can still be paid or released.` : "Nothing is on hold.",
      "It can be resumed at any time."],
  },
  resume: {
    title: "Resume", may: (row) => row.state === "paused",
    will: (row) => ["From now on, grabs are taken again.", `${row.kind === "envelope" ? left(row) : counted(row.units_left, "unit")} can be grabbed.`],
  },
  amend: { title: "Amend", may: (row) => row.state === "open" || row.state === "paused", will: () => [] },
  close: {
    title: "Close", danger: true, may: (row) => row.state === "open" || row.state === "paused",
    will: (row) => ["The offer closes permanently: it cannot be opened again.",
      `${left(row)} go back to ${row.terms.funding ? "the funding account" : "the issuer"}.`,
      row.held ? `${counted(row.held, "unit")} on hold can still be paid until their deadlines.` : "Nothing is on hold.",
      row.waiting ? `${counted(row.waiting, "grab")} on the waiting list will get nothing.` : "The waiting list is empty.",
      row.kind === "envelope" ? "The seed is revealed, so that anyone can recompute the parts." : ""].filter(Boolean),
  },
};

/** The buttons of an offer. `update(row)` shows those that are possible; `done(listener)` hears of answers. */
export function actions(id) {
  let row = null;
  let refresh = null;
  const listeners = [];
  const buttons = Object.fromEntries(Object.entries(ACTIONS).map(([name, action]) => [name,
    h("button", { type: "button", class: action.danger ? "danger" : null, hidden: true, "data-action": name, on: { click: () => open(name) } }, action.title)]));
  const element = h("div", { class: "actions", role: "group", "aria-label": "Actions" }, Object.values(buttons));

  function open(name) {
    const action = ACTIONS[name];
    // One key for the dialog: sent again after a lost answer, it is the same command.
    const key = newKey();
    const fields = name === "amend" ? amendment(row) : null;
    refresh = ask({
      title: `${action.title} ${row.title || id}`,
      button: `${action.title} the offer`,
      danger: action.danger,
      fields: fields?.element,
      sure: action.danger ? id : "",
      // While the dialog is open, the offer changes: the preview uses the newest numbers.
      preview: () => (fields ? fields.inWords(row) : action.will(row)),
      may: () => !fields || Object.keys(fields.changes()).length > 0,
      run: () => {
        const path = `/v1/offers/${part(id)}`;
        return name === "amend" ? send("PATCH", path, { changes: fields.changes() }, fields.key(key)) : send("POST", `${path}/${name}`, {}, key);
      },
      done: () => listeners.forEach((listener) => listener()),
      closed: () => (refresh = null),
    });
  }

  return {
    element,
    update(now) {
      row = now;
      for (const [name, button] of Object.entries(buttons)) show(button, ACTIONS[name].may(row));
      refresh?.();
    },
    done: (listener) => listeners.push(listener),
  };
}

const asInput = (ms) => (ms ? new Date(ms).toISOString().slice(0, 16) : "");

/** The fields of an amendment. An envelope keeps its money and parts. */
function amendment(row) {
  const fields = {};
  const add = (name, label, attributes, read, word) => (fields[name] = { label, input: h("input", attributes), read, word, before: attributes.value ?? "" });
  const whole = (text) => (text === "" ? undefined : Number(text));
  add("title", "Title", { value: row.title, maxlength: 200 }, (text) => text, (text) => `“${text}”`);
  if (row.kind !== "envelope") {
    add("total", "Total units", { type: "number", min: 1, step: 1, value: row.total }, whole, count);
    add("max_per_grab", "Units in one grab, at most", { type: "number", min: 1, step: 1, value: row.terms.max_per_grab ?? "" }, whole, count);
  }
  add("closes_at", "Closes at (UTC)", { type: "datetime-local", value: asInput(row.closes_at) }, (text) => (text ? Date.parse(`${text}Z`) : undefined), moment);

  const changed = () => Object.entries(fields).flatMap(([name, field]) => {
    if (field.input.value === String(field.before)) return [];
    const value = field.read(field.input.value);
    return value === undefined || Number.isNaN(value) ? [] : [[name, value]];
  });
  const keys = new Map();
  return {
    element: h("div", { class: "grid" }, Object.values(fields).map((field) => h("label", {}, field.label, field.input))),
    changes: () => Object.fromEntries(changed()),
    /** Other changes are another command. */
    key(first) {
      const text = JSON.stringify(changed());
      if (!keys.has(text)) keys.set(text, keys.size ? newKey() : first);
      return keys.get(text);
    },
    inWords(now) {
      const found = changed().map(([name, value]) => {
        const before = fields[name].before === "" ? "unset" : name === "closes_at" ? moment(row.closes_at) : fields[name].word(fields[name].read(String(fields[name].before)));
        return `${fields[name].label}: ${before} → ${fields[name].word(value)}`;
      });
      const total = changed().find(([name]) => name === "total")?.[1];
      if (total !== undefined) found.push(total > now.total ? `${counted(total - now.total, "unit")} come from the issuer.` : `${counted(now.total - total, "unit")} go back to the issuer, if so many are left (${count(now.units_left)} now).`);
      return found.length ? found : ["Nothing changes yet."];
    },
  };
}
