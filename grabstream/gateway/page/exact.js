// JSON as the gateway writes it: sums may have more digits than a number keeps.

/** As JSON.parse, but an integer that a number would round becomes a BigInt. */
export function parsedExactly(text) {
  if (!/[0-9]{16}/.test(text)) return JSON.parse(text);
  // Strings stay as they are, whatever they contain: the mark is new each time.
  const mark = `${crypto.getRandomValues(new Uint32Array(4)).join("-")}:`;
  const marked = text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?/g, (part) => {
    const isExact = !/^-?[0-9]{16,}$/.test(part) || Number.isSafeInteger(Number(part));
    return isExact ? part : `"${mark}${part}"`;
  });
  return JSON.parse(marked, (_, value) =>
    typeof value === "string" && value.startsWith(mark) ? BigInt(value.slice(mark.length)) : value,
  );
}
