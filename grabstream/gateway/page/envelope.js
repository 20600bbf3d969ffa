// The picture of an envelope, which opens and shows an amount. Its caption stands next to it.

import { h, put, say } from "./dom.js";

const OPENING_MS = 1800;

export function envelope() {
  const amount = h("b");
  const unit = h("span");
  const element = h("div", { class: "envelope", "aria-hidden": "true" },
    h("span", { class: "back" }), h("span", { class: "flap" }), h("span", { class: "slip" }, amount, unit),
    h("span", { class: "front" }), h("span", { class: "seal" }));
  let shown = "";
  let timer = 0;
  function be(state) {
    put(element, "class", state ? `envelope ${state}` : "envelope");
    shown = state;
  }
  return {
    element,
    /** `state` is closed (""), `asked`, or `gone`; an open envelope stays open. */
    update(state) {
      if (!shown.startsWith("open")) be(state);
    },
    /** Shows what is in it. `opens`: a moment ago it was closed. */
    open(text, of, opens) {
      say(amount, text);
      say(unit, of);
      if (shown.startsWith("open")) return;
      clearTimeout(timer);
      be(opens ? "open opening" : "open");
      if (opens) timer = setTimeout(() => be("open"), OPENING_MS);
    },
    close() {
      clearTimeout(timer);
      be("");
    },
  };
}
