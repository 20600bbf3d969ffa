// The dialog of an action: it says what the action will do, and sends it once it is confirmed.

import { Refused } from "./api.js";
import { h, keyed, say, show } from "./dom.js";

/**
 * Opens the dialog. `title` heads it, `button` names the action, `fields` is an element to fill in, `sure` a text
 * to type for what cannot be undone. `preview()` gives what the action will do, in sentences; `may()` whether it
 * can be sent. `run()` sends it; `done()` hears that it was answered, `closed()` that the dialog is gone. Returns
 * a function that renders the preview again.
 */
export function ask({ title, button, danger = false, fields = null, sure = "", preview, may = () => true, run, done, closed = () => {} }) {
  const list = h("ul", { class: "preview" });
  const typed = sure ? h("input", { type: "text", autocomplete: "off", spellcheck: "false" }) : null;
  const problem = h("p", { class: "note bad", role: "alert", hidden: true });
  const submit = h("button", { class: danger ? "main danger" : "main" }, button);
  const form = h("form", { class: "inner" },
    h("h2", { id: "action-title" }, title),
    fields,
    h("div", {}, h("h3", {}, "What this will do"), list),
    typed && h("label", {}, `Type ${sure} to confirm`, typed),
    problem,
    h("div", { class: "row" }, h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel"), submit));
  const dialog = h("dialog", { "aria-labelledby": "action-title", on: { close: () => {
    closed();
    dialog.remove();
  } } }, form);

  let sending = false;
  function check() {
    keyed(list, preview().map((text, index) => ({ text, index })), (one) => one.index, () => h("li"), (node, one) => say(node, one.text));
    submit.disabled = sending || !may() || (typed !== null && typed.value !== sure);
  }
  form.addEventListener("input", check);
  check();

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    sending = true;
    check();
    show(problem, false);
    try {
      const answer = await run();
      dialog.close();
      done(answer);
    } catch (error) {
      say(problem, error instanceof Refused ? error.message : `${error.message} It is unknown whether the command was decided: try again, it is the same command.`);
      show(problem, true);
    } finally {
      sending = false;
      check();
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  return check;
}
