// The console of operators: which page is shown, the API key, and whether what is shown is fresh.

import { Refused, key } from "./api.js";
import { h, put, say, show } from "./dom.js";
import { offer } from "./offer.js";
import { overview } from "./overview.js";
import { system } from "./system.js";
import { user } from "./user.js";
import { webhooks } from "./webhooks.js";

const main = document.getElementById("content");
const live = document.getElementById("live");
const liveText = document.getElementById("live-text");
const keyButton = document.getElementById("key");

const PAGES = {
  "": ["overview", overview, "Overview"],
  offers: ["offer", offer, "Offer"],
  users: ["user", user, "User"],
  webhooks: ["webhooks", webhooks, "Webhooks"],
  system: ["system", system, "System"],
};

let shown = null;
/** The errors of the polls that do not succeed now. */
const troubles = new Map();

function report(error, source) {
  if (error) troubles.set(source, error);
  else troubles.delete(source);
  showTrouble();
}

function showTrouble() {
  const error = troubles.values().next().value ?? null;
  put(live, "class", error ? "live off" : "live on");
  const text = document.hidden ? "Paused" : !error ? "Live" : error instanceof Refused && error.status === 401 ? "Sign in" : "Not live";
  if (liveText.textContent !== text) liveText.textContent = text;
  show(banner, Boolean(error) && !(error instanceof Refused && error.status === 404));
  say(banner, error?.message ?? "");
}

const banner = h("p", { class: "note bad", role: "status", hidden: true });

/** Shows the page that the address names. `#/offers/lunch?x=1` has the page `offers` and the id `lunch`. */
function route(isFirst = false) {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/").map((text) => decode(text));
  const [page, view, title] = PAGES[name] ?? PAGES[""];
  shown?.abort();
  shown = new AbortController();
  troubles.clear();
  show(banner, false);
  const context = { id: id ?? "", query: new URLSearchParams(query ?? ""), signal: shown.signal, report };
  const element = view(context);
  main.replaceChildren(banner, element);
  document.title = `${id ? `${id} · ` : ""}${title} · grabstream`;
  for (const tab of document.querySelectorAll("[data-page]")) {
    if (tab.dataset.page === page) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  if (!isFirst) {
    window.scrollTo(0, 0);
    const heading = main.querySelector("h1");
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // not encoded by this page: shown as it is, and no route has it
  }
}

// -- the API key --------------------------------------------------------------------------------------------

const keyField = h("input", { type: "password", name: "key", autocomplete: "off", spellcheck: "false", id: "key-field" });
const keyWhy = h("p", { class: "soft", id: "key-why" });
const forget = h("button", { type: "button", on: { click: () => useKey("") } }, "Forget the key");
const keyDialog = h("dialog", { "aria-labelledby": "key-title", "aria-describedby": "key-why" },
  h("form", { method: "dialog", class: "inner", on: { submit: () => useKey(keyField.value.trim()) } },
    h("h2", { id: "key-title" }, "API key"),
    keyWhy,
    h("label", {}, "Secret of the key", keyField),
    h("div", { class: "row" }, forget,
      h("button", { type: "button", on: { click: () => keyDialog.close() } }, "Cancel"),
      h("button", { class: "main" }, "Use this key"))));
document.body.append(keyDialog);

function useKey(secret) {
  key.set(secret);
  keyField.value = "";
  keyDialog.close();
  document.dispatchEvent(new CustomEvent("key-changed"));
}

const KEPT = "This tab keeps it until it is closed, and sends it to this gateway only. Reading needs the scope read, actions and the doctor need operate.";

function askForKey(why) {
  if (document.querySelector("dialog[open]")) return;
  say(keyWhy, why ? `${why} ${KEPT}` : KEPT);
  show(forget, key.get() !== "");
  keyDialog.showModal();
  keyField.focus();
}

keyButton.addEventListener("click", () => askForKey(""));
let asked = false;
document.addEventListener("key-wanted", (event) => {
  // Once automatically; after that, there is the button.
  if (!asked) askForKey(event.detail);
  asked = true;
});
document.addEventListener("key-changed", () => (asked = false));
document.addEventListener("visibilitychange", showTrouble);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the page that is shown
  main.focus();
});
window.addEventListener("hashchange", () => route());
route(true);
