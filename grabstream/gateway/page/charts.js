// Charts in SVG. Their elements are made once, and moved when the numbers change.

import { h, keyed, put, s, say, show } from "./dom.js";
import { brief, count, words } from "./format.js";

const WIDTH = 600;
const HEIGHT = 160;

/** The least round number that is not below a value: 1, 2, 5, 10, 20, … */
export function ceiling(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

/** The frame of a chart: rules, the numbers at the left (`top` sets the largest), and texts below. */
function frame(label, low) {
  const y = [h("span"), h("span"), h("span", {}, "0")];
  const x = h("div", { class: "x", "aria-hidden": "true" });
  const plot = s("g");
  const image = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    [0, 0.5, 1].map((at) => s("line", { class: "rule", x1: 0, x2: WIDTH, y1: at * HEIGHT, y2: at * HEIGHT })), plot);
  const element = h("div", { class: low ? "chart low" : "chart" }, h("div", { class: "y", "aria-hidden": "true" }, y), image, x);
  return {
    element, plot, image,
    top(value) {
      say(y[0], brief(value));
      say(y[1], brief(value / 2));
    },
    below: (texts) => keyed(x, texts.map((text, index) => ({ text, index })), (one) => one.index, () => h("span"), (node, one) => say(node, one.text)),
  };
}

/** Colours of outcomes; every other one is grey. */
export const COLOUR = { granted: 1, held: 2, waiting: 3, sold_out: 6, already_taken: 4, limit_reached: 5, not_open_yet: 7 };
export const colourOf = (outcome) => COLOUR[outcome] ?? 6;

/** Stacked bars, one for each second. `update(columns, series)`: columns are objects of numbers by name. */
export function stacked(label) {
  const of = frame(label);
  return {
    element: of.element,
    update(columns, names, below) {
      const most = ceiling(Math.max(1, ...columns.map((column) => names.reduce((sum, name) => sum + (column.values[name] ?? 0), 0))));
      of.top(most);
      of.below(below);
      const width = WIDTH / columns.length;
      const rows = columns.flatMap((column, index) => {
        let at = 0;
        return names.map((name) => {
          const value = column.values[name] ?? 0;
          const row = { key: `${index} ${name}`, name, x: index * width, at, value };
          at += value;
          return row;
        });
      });
      keyed(of.plot, rows, (row) => row.key,
        (row) => s("rect", { class: `f${colourOf(row.name)}`, width: (width * 0.78).toFixed(2) }),
        (node, row) => {
          put(node, "x", (row.x + width * 0.11).toFixed(2));
          put(node, "y", (HEIGHT * (1 - (row.at + row.value) / most)).toFixed(2));
          put(node, "height", ((HEIGHT * row.value) / most).toFixed(2));
        });
    },
  };
}

/** Bars of one colour, and a line across them: what was, against what the law expects. */
export function against(label, low = true) {
  const of = frame(label, low);
  const bars = s("g");
  const line = s("path", { class: "law" });
  of.plot.append(bars, line);
  return {
    element: of.element,
    /** `line` has a number for each bar, or is null; `steps` draws it level over each bar. */
    update(values, expected, below) {
      const most = ceiling(Math.max(1, ...values, ...(expected ?? [0])));
      of.top(most);
      of.below(below);
      const width = WIDTH / Math.max(values.length, 1);
      const y = (value) => (HEIGHT * (1 - value / most)).toFixed(2);
      keyed(bars, values.map((value, index) => ({ value, index })), (one) => one.index, () => s("rect", { class: "f2" }), (node, one) => {
        put(node, "x", (one.index * width + width * 0.1).toFixed(2));
        put(node, "width", (width * 0.8).toFixed(2));
        put(node, "y", y(one.value));
        put(node, "height", ((HEIGHT * one.value) / most).toFixed(2));
      });
      put(line, "d", (expected ?? []).map((value, index) =>
        `${index ? "L" : "M"}${(index * width).toFixed(2)} ${y(value)}H${((index + 1) * width).toFixed(2)}`).join(""));
    },
  };
}

/** Areas on top of each other over time, with a cursor. `points` have `x` from 0 to 1, and `values` in order. */
export function areas(label, colours) {
  const of = frame(label);
  const paths = colours.map((colour) => s("path", { class: `f${colour}` }));
  const cursor = s("line", { class: "cursor", y1: 0, y2: HEIGHT });
  of.plot.append(...paths, cursor);
  return {
    element: of.element,
    /** `most` is the whole, in the unit that is shown, `one` such a unit in the numbers of the points. */
    update(points, most, below, one = 1) {
      of.top(most);
      of.below(below);
      const y = (value) => (HEIGHT * (1 - value / one / most)).toFixed(2);
      paths.forEach((path, layer) => {
        const sum = (point, upTo) => point.values.slice(0, upTo).reduce((all, value) => all + value, 0);
        // Numbers stay as they are until the next point: steps, not slopes.
        const upper = points.map((point, index) => {
          const level = y(sum(point, layer + 1));
          return index ? `H${(point.x * WIDTH).toFixed(2)}V${level}` : `M0 ${level}`;
        });
        const back = [...points].reverse();
        const lower = back.map((point, index) => {
          const level = y(sum(point, layer));
          const to = index + 1 < back.length ? point.x * WIDTH : 0;
          return index ? `V${level}H${to.toFixed(2)}` : `H${WIDTH}V${level}H${to.toFixed(2)}`;
        });
        put(path, "d", points.length ? `${upper.join("")}${lower.join("")}Z` : "");
      });
    },
    at(x) {
      put(cursor, "x1", (x * WIDTH).toFixed(2));
      put(cursor, "x2", (x * WIDTH).toFixed(2));
    },
  };
}

/** A bar of parts of a whole. `update(parts, whole, words)`: parts are numbers, in the order of the colours. */
export function bar(colours) {
  const parts = colours.map((colour) => s("rect", { class: `f${colour}`, y: 0, height: 8 }));
  const element = s("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img" }, parts);
  return {
    element,
    update(values, whole, label) {
      put(element, "aria-label", label);
      let at = 0;
      values.forEach((value, index) => {
        const width = whole > 0 ? (100 * value) / whole : 0;
        put(parts[index], "x", at.toFixed(3));
        put(parts[index], "width", width.toFixed(3));
        at += width;
      });
    },
  };
}

/** Names with their colours and numbers. Items: {name, colour, value, line}. */
export function legend() {
  const element = h("ul", { class: "legend" });
  return {
    element,
    update(items) {
      show(element, items.length > 0);
      keyed(element, items, (item) => item.name,
        (item) => h("li", {}, h("span", { class: `swatch t${item.colour}${item.line ? " line" : ""}`, "aria-hidden": "true" }),
          h("span", {}, words(item.name)), h("b", { "data-outcome": item.name })),
        (node, item) => say(node.lastChild, item.value === undefined ? "" : typeof item.value === "number" ? count(item.value) : item.value));
    },
  };
}
