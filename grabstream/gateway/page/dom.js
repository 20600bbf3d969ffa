// Elements. Text is only ever inserted as text; nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (/^on|^style$|^srcdoc$/i.test(name)) throw new Error(`attribute ${name}`);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** An element with attributes, listeners (`on`) and children; strings become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets a text, unless it is already set. */
export function say(node, text) {
  const wanted = String(text ?? "");
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Sets an attribute, unless it is already set. */
export function put(node, name, value) {
  const wanted = String(value);
  if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
}

/** Shows or hides an element. */
export function show(node, is) {
  if (node.hidden === Boolean(is)) node.hidden = !is;
}

/** What is asked for; null when there is no such thing, which the note `missing` then says. */
export async function orMissing(asked, missing) {
  let found = null;
  try {
    found = await asked;
  } catch (error) {
    if (error.status !== 404) throw error;
    say(missing, error.message);
  }
  show(missing, found === null);
  return found;
}

/** Brings the children of a parent in line with items: those of known keys are updated in place. */
export function keyed(parent, items, keyOf, make, update) {
  const known = (parent.known ??= new Map());
  const seen = new Set();
  let next = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let node = known.get(key);
    if (!node) known.set(key, (node = make(item)));
    update?.(node, item);
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
  for (const [key, node] of known) {
    if (!seen.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
}

/** A card with a heading. `end` is at the right of the heading. */
export function card(title, body, { end = null, flush = false, kind = "" } = {}) {
  const id = `h-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { class: `card ${kind}`.trim(), "aria-labelledby": id },
    h("header", {}, h("h2", { id }, title), end && h("div", { class: "end" }, end)),
    h("div", { class: flush ? "body flush" : "body" }, body));
}

/** A row of numbers. `set` of a tile changes its number, and what stands below it. */
export function tiles(names) {
  const all = {};
  const element = h("dl", { class: "tiles" }, Object.entries(names).map(([name, label]) => {
    const value = h("span", { class: "value", "data-value": name }, "–");
    const more = h("span", { class: "more" });
    all[name] = (text, below = "", tone = "") => {
      say(value, text);
      say(more, below);
      put(more, "class", tone ? `more ${tone}` : "more");
    };
    return h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value, more));
  }));
  return { element, set: all };
}

/** A table that is updated in place. Columns: {title, cell(item) → text or node, number, wrap, head}. */
export function table(caption, columns, keyOf, nothing = "Nothing yet.") {
  const body = h("tbody");
  const grid = h("table", {},
    h("caption", { class: "hidden-text" }, caption),
    h("thead", {}, h("tr", {}, columns.map((column) =>
      h("th", { scope: "col", class: column.number ? "number" : null }, column.title)))), body);
  const empty = h("p", { class: "empty" }, "Loading…");
  const scroll = h("div", { class: "scroll", role: "group", "aria-label": caption, tabindex: "0", hidden: true }, grid);
  const element = h("div", {}, scroll, empty);
  function update(items) {
    show(scroll, items.length > 0);
    show(empty, items.length === 0);
    say(empty, nothing);
    keyed(body, items, keyOf,
      () => h("tr", {}, columns.map((column) =>
        h(column.head ? "th" : "td", {
          scope: column.head ? "row" : null,
          class: [column.number && "number", column.wrap && "wrap", column.class].filter(Boolean).join(" ") || null,
        }))),
      (row, item) => columns.forEach((column, index) => {
        const cell = row.children[index];
        const content = column.cell(item, cell);
        if (content === undefined) return;
        if (content instanceof Node) {
          if (cell.childNodes.length !== 1 || !cell.firstChild.isEqualNode(content)) cell.replaceChildren(content);
        } else say(cell, content);
      }));
  }
  return { element, update };
}
