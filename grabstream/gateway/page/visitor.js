// The visitor of the page: a user by a token or, without authentication, by a name. What the fragment of the
// address hands over (`#token=…`, `#user=…`, `#ticket=…`) is removed at once; the tab keeps it.

import { key } from "./api.js";

const USER = "grabstream.user";
const TICKET = "grabstream.ticket";
const ID = /^[A-Za-z0-9._:-]{1,64}$/;

export const isRequired = document.documentElement.dataset.authentication === "required";
key.name = "grabstream.token";

/** The user that a token names; null if it is not a token. Only the gateway can check whether it is valid. */
export function userOf(token) {
  try {
    const payload = token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/");
    const { sub } = JSON.parse(atob(payload));
    return ID.test(sub) ? sub : null;
  } catch {
    return null; // no token at all
  }
}

export const visitor = {
  /** The user, or null while unknown. */
  get user() {
    return isRequired ? userOf(key.get()) : sessionStorage.getItem(USER);
  },
  get ticket() {
    return sessionStorage.getItem(TICKET) ?? undefined;
  },
  /** Takes a token, or the name of a user; returns whether it can be one. */
  enter(text) {
    if (isRequired ? userOf(text) === null : !ID.test(text) || text === "." || text === "..") return false;
    if (isRequired) key.set(text);
    else sessionStorage.setItem(USER, text);
    changed();
    return true;
  },
  leave() {
    key.set("");
    sessionStorage.removeItem(USER);
    sessionStorage.removeItem(TICKET);
    changed();
  },
};

const changed = () => document.dispatchEvent(new CustomEvent("key-changed"));

function takeFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const handed = given.get(isRequired ? "token" : "user");
  if (!["token", "user", "ticket"].some((name) => given.has(name))) return;
  history.replaceState(null, "", location.pathname);
  if (given.has("ticket")) sessionStorage.setItem(TICKET, given.get("ticket"));
  if (handed !== null) visitor.enter(handed.trim());
}

window.addEventListener("hashchange", takeFromAddress);
takeFromAddress();
