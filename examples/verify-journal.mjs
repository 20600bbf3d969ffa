// A reader of the journal that shares no code with grabstream: it applies the reading rule of docs/journal.md
// to a dump of the records, verifies the chain of hashes, and prints the head of each shard.
//
//     grabstream dump > journal.jsonl        (or: kcat -C -b HOST:PORT -t grab.journal -e -q -J)
//     node verify-journal.mjs [--keys ID:KEY,…] [--topic NAME] [--json] [FILE]
//     node verify-journal.mjs --vectors FOLDER
//
// Without FILE, or with -, it reads standard input. --keys takes what GRAB_JOURNAL_PUBLIC_KEYS has: then only
// what a known relay signed counts, from the first signed marker of a shard onwards. Without keys, records
// count as if there were no signatures. Memory does not grow with the dump. Exit code 0: every shard is
// whole; 1: a shard has a gap or contradicts itself; 2: wrong usage, or this is not a dump. Node.js 20, no
// dependency.

import { createHash, createPublicKey, verify } from "node:crypto";
import { createReadStream, readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";

const GENESIS = Buffer.alloc(32);
/** Maximum chunks of a stream in a line, of at most 64 KiB each: a record is at most some MiB. */
const CHUNKS_MAX = 4_096;
const SIGNED_OWNER = "-signed";
const SIGNED_HEADERS = ["term", "owner", "first_seq", "count", "seqs", "prev", "head"];
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

class Usage extends Error {}
class Stop extends Error {
  constructor(verdict, why) {
    super(why);
    this.verdict = verdict;
  }
}
const corrupt = (why) => new Stop("corrupt", why);
const gap = (why) => new Stop("gap", why);

// -- a record ----------------------------------------------------------------------------------------------

/** Headers by name; of several with one name, the last one. A null counts as empty. */
function named(headers) {
  return new Map(headers.map(([name, value]) => [name, value ?? Buffer.alloc(0)]));
}

function number(headers, name) {
  const text = headers.get(name)?.toString("latin1");
  if (text === undefined || !/^[0-9]{1,15}$/.test(text)) throw corrupt(`header ${name} is not a number`);
  return Number(text);
}

function digest(headers, name) {
  const text = headers.get(name)?.toString("latin1");
  if (text === undefined || !/^[0-9a-f]{64}$/.test(text)) throw corrupt(`header ${name} is not a hash`);
  return Buffer.from(text, "hex");
}

/** The lines of a value, without the newlines between them. */
function linesOf(value) {
  const lines = [];
  let from = 0;
  for (let at = value.indexOf(10); at >= 0; at = value.indexOf(10, from)) {
    lines.push(value.subarray(from, at));
    from = at + 1;
  }
  lines.push(value.subarray(from));
  return lines;
}

/** The last seq of each line. A run takes several; where each line begins is in its text. */
function lastSeqs(lines, firstSeq, seqs) {
  if (seqs === lines.length) return lines.map((_, index) => firstSeq + index);
  const begins = /^\{"type":"[a-z._]{1,64}","v":[0-9]{1,9},"shard":[0-9]{1,9},"seq":([0-9]{1,15}),/;
  // Enough bytes for the fields that come first.
  const found = lines.map((line) => Number(begins.exec(line.toString("latin1", 0, 160))?.[1] ?? 0));
  const ends = [...found.slice(1), firstSeq + seqs];
  if (found[0] !== firstSeq || found.some((seq, index) => seq >= ends[index])) {
    throw corrupt(`the lines from seq ${firstSeq} on do not cover ${seqs} seqs by their texts`);
  }
  return ends.map((seq) => seq - 1);
}

/** The block in a record; its lines are chained from its header `prev`. */
function parse(headers, value, partition, isSigned) {
  const shard = number(headers, "shard");
  const term = number(headers, "term");
  const count = number(headers, "count");
  let owner;
  try {
    owner = utf8.decode(headers.get("owner"));
  } catch {
    throw corrupt("header owner is not UTF-8");
  }
  if (!headers.has("owner")) throw corrupt("header owner is missing");
  if (shard !== partition) throw corrupt(`a block of shard ${shard} in partition ${partition}`);
  if (count === 0) {
    if (!isSigned || !headers.get("head")?.length) return { term, owner, count };
    return { term, owner, count, firstSeq: number(headers, "first_seq"), head: digest(headers, "head") };
  }
  const firstSeq = number(headers, "first_seq");
  const seqs = headers.has("seqs") ? number(headers, "seqs") : count;
  const prev = digest(headers, "prev");
  const head = digest(headers, "head");
  const lines = linesOf(value);
  if (lines.length !== count) throw corrupt(`${lines.length} lines where the header says ${count}`);
  let hash = prev;
  const hashes = lines.map((line) => (hash = createHash("sha256").update(hash).update(line).digest()));
  if (!hash.equals(head)) throw corrupt(`the lines from seq ${firstSeq} on do not lead to the head`);
  return { term, owner, count, firstSeq, prev, lines, hashes, ends: lastSeqs(lines, firstSeq, seqs) };
}

/** Whether the texts of a block carry the numbers that its headers say. */
function checkTexts(block, shard) {
  let seq = block.firstSeq;
  block.lines.forEach((line, index) => {
    let event;
    try {
      event = JSON.parse(utf8.decode(line));
    } catch {
      throw corrupt(`the event of seq ${seq} is not JSON`);
    }
    if (event === null || typeof event !== "object") throw corrupt(`the event of seq ${seq} is not an object`);
    const isRun = event.type === "grab.granted" || event.type === "grab.held";
    const last = event.seq + (isRun ? event.grabs?.length : 1) - 1;
    if (event.shard !== shard || event.seq !== seq || last !== block.ends[index]) {
      throw corrupt(`the event of seq ${seq} carries other numbers in its text`);
    }
    seq = last + 1;
  });
}

// -- signatures --------------------------------------------------------------------------------------------

/** The public keys by id, from `id:base64,id:base64`. */
function keysOf(text) {
  const keys = new Map();
  for (const one of text.split(",").map((part) => part.trim()).filter(Boolean)) {
    const [, id, key] = /^([A-Za-z0-9._-]{1,64}):([A-Za-z0-9+/_-]{43}=?)$/.exec(one) ?? [];
    if (!id) throw new Usage(`--keys: ${JSON.stringify(one)} is not ID:KEY with an Ed25519 key in base64`);
    const x = Buffer.from(key, "base64").toString("base64url");
    keys.set(id, createPublicKey({ key: { kty: "OKP", crv: "Ed25519", x }, format: "jwk" }));
  }
  return keys;
}

/** What the signature of a record covers. */
function signedText(topic, partition, headers) {
  const parts = ["grabstream journal record 1", topic, String(partition)].map((part) => Buffer.from(part));
  for (const name of SIGNED_HEADERS) {
    const value = headers.get(name) ?? Buffer.alloc(0);
    parts.push(Buffer.concat([Buffer.from(`${value.length}:`), value]));
  }
  return Buffer.concat(parts.flatMap((part, index) => (index ? [Buffer.from("\n"), part] : [part])));
}

/** `unchecked` without keys; `signed` by a known relay; `unsigned`, or `forged`: it claims to be signed. */
function authority(keys, topic, partition, headers) {
  if (!keys.size) return "unchecked";
  const text = (name) => headers.get(name)?.toString("latin1") ?? "";
  const [owner, id, signature] = [text("owner"), text("key"), text("sig")];
  if (!id && !signature && !owner.endsWith(SIGNED_OWNER)) return "unsigned";
  const key = keys.get(id);
  if (!key || !owner.endsWith(SIGNED_OWNER) || !/^[0-9a-fA-F]{128}$/.test(signature)) return "forged";
  const covered = signedText(topic, partition, headers);
  return verify(null, covered, key, Buffer.from(signature, "hex")) ? "signed" : "forged";
}

// -- a shard -----------------------------------------------------------------------------------------------

/** A reader of one shard: the position after the records that it has taken. */
class Shard {
  verdict = "whole";
  why = "";
  seq = 0;
  head = GENESIS;
  lines = 0;
  nextOffset = 0;
  term = 0;
  owner = "";
  ignored = [];

  constructor(partition) {
    this.partition = partition;
  }

  take(topic, keys, record) {
    if (this.verdict !== "whole" || record.offset < this.nextOffset) return;
    try {
      this.feed(authority(keys, topic, this.partition, record.headers), record);
      this.nextOffset = record.offset + 1;
    } catch (error) {
      if (!(error instanceof Stop)) throw error;
      this.verdict = error.verdict;
      this.why = `offset ${record.offset}: ${error.message}`;
    }
  }

  feed(by, { offset, headers, value }) {
    let block;
    let fault;
    // 1. What no known relay signed does not count, whatever it contains, once signing has begun.
    if (by !== "forged" && !(by === "unsigned" && this.owner.endsWith(SIGNED_OWNER))) {
      try {
        block = parse(headers, value, this.partition, by === "signed");
      } catch (error) {
        if (!(error instanceof Stop)) throw error;
        // Headers that a relay signed, with lines of another record, are forged.
        if (by !== "signed") fault = error;
      }
    }
    if (fault) throw fault;
    if (!block) {
      this.ignored.push(offset);
      return;
    }
    // 2. A marker counts if its term is higher than that of every marker before it.
    if (block.count === 0) {
      if (block.term > this.term) [this.term, this.owner] = [block.term, block.owner];
      else if (block.head && block.term === this.term && block.owner === this.owner) this.compare(block);
      return;
    }
    // 3. A block counts if its term and owner are those of the last marker that counts.
    if (block.term > this.term) throw corrupt(`a block of term ${block.term} without its marker`);
    if (block.term < this.term || block.owner !== this.owner) return;
    // 4. Lines that were seen are dropped; the others must follow the last one, by seq and by hash.
    if (block.firstSeq - 1 > this.seq) throw gap(`begins at seq ${block.firstSeq}, the last is ${this.seq}`);
    const known = block.ends.filter((end) => end <= this.seq).length;
    if (this.seq > block.ends.at(-1)) return;
    if (this.seq >= block.firstSeq && block.ends[known - 1] !== this.seq) {
      throw corrupt(`seq ${this.seq}, where the reader is, is within a run of grabs`);
    }
    const hash = known ? block.hashes[known - 1] : block.prev;
    if (!hash.equals(this.head)) throw corrupt(`another history at seq ${this.seq}`);
    if (known === block.count) return;
    checkTexts(block, this.partition);
    [this.seq, this.head] = [block.ends.at(-1), block.hashes.at(-1)];
    this.lines += block.count - known;
  }

  /** An anchor: it names the history before it by its last seq and hash. */
  compare(anchor) {
    const seq = anchor.firstSeq - 1;
    if (seq < this.seq) return;
    if (seq > this.seq) throw gap(`the anchor is at seq ${seq}, the last is ${this.seq}`);
    if (!anchor.head.equals(this.head)) throw corrupt(`another history at seq ${seq} than the anchor has`);
  }

  get found() {
    const { verdict, seq, head, lines, nextOffset, term, owner, ignored } = this;
    return { verdict, seq, head: head.toString("hex"), lines, next_offset: nextOffset, term, owner, ignored };
  }

  get words() {
    const place = `seq ${this.seq}, head ${this.head.toString("hex")}, ${this.lines} lines`;
    const ignored = this.ignored.length ? `, ${this.ignored.length} records ignored` : "";
    return this.verdict === "whole"
      ? `shard ${this.partition}: whole: ${place}${ignored}`
      : `shard ${this.partition}: ${this.verdict} at ${this.why}; before it: ${place}${ignored}`;
  }
}

// -- a dump ------------------------------------------------------------------------------------------------

/** The bytes of a text, of `{"base64": …}`, or null. */
function bytes(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "string") return Buffer.from(value);
  if (typeof value.base64 === "string") return Buffer.from(value.base64, "base64");
  throw new TypeError("not bytes");
}

function recordOf(line) {
  const { topic, partition, offset, headers = [], payload } = JSON.parse(line);
  if (typeof topic !== "string" || !Number.isSafeInteger(partition) || !Number.isSafeInteger(offset)) {
    throw new TypeError("topic, partition or offset is missing");
  }
  const pairs = [];
  for (let at = 0; at < headers.length; at += 2) pairs.push([headers[at], bytes(headers[at + 1])]);
  return { topic, partition, offset, headers: named(pairs), value: bytes(payload) ?? Buffer.alloc(0) };
}

/** The lines of a stream of bytes. Only a newline ends one: texts may have other separators. */
async function* linesIn(chunks) {
  let parts = [];
  for await (const chunk of chunks) {
    let from = 0;
    for (let at = chunk.indexOf(10); at >= 0; at = chunk.indexOf(10, from)) {
      parts.push(chunk.subarray(from, at));
      yield Buffer.concat(parts).toString();
      parts = [];
      from = at + 1;
    }
    parts.push(chunk.subarray(from));
    if (parts.length > CHUNKS_MAX) throw new Usage("a line is too long to be a record");
  }
  if (parts.some((part) => part.length)) yield Buffer.concat(parts).toString();
}

/** The topic of a dump, and its shards by number, in order. */
async function read(lines, keys, topic) {
  const shards = new Map();
  let count = 0;
  for await (const line of lines) {
    count += 1;
    let record;
    try {
      record = recordOf(line);
    } catch (error) {
      throw new Usage(`line ${count} is not a record of a dump: ${error.message}`);
    }
    topic ??= record.topic;
    if (record.topic !== topic) throw new Usage(`line ${count} is of topic ${record.topic}, not of ${topic}`);
    if (!shards.has(record.partition)) shards.set(record.partition, new Shard(record.partition));
    shards.get(record.partition).take(topic, keys, record);
  }
  return { topic, shards: new Map([...shards].sort(([one], [other]) => one - other)) };
}

const found = ({ shards }) => Object.fromEntries([...shards].map(([number, shard]) => [number, shard.found]));

/** Reads each NAME.jsonl of a folder, and compares what is found with NAME.verdict.json. */
async function readVectors(folder) {
  let differ = 0;
  const names = readdirSync(folder).filter((name) => name.endsWith(".jsonl")).sort();
  if (!names.length) throw new Usage(`${folder} has no vectors`);
  for (const file of names) {
    const name = file.slice(0, -".jsonl".length);
    const expected = JSON.parse(readFileSync(join(folder, `${name}.verdict.json`), "utf8"));
    const lines = linesIn(createReadStream(join(folder, file)));
    const given = JSON.stringify(found(await read(lines, keysOf(expected.keys), expected.topic)));
    const wanted = JSON.stringify(expected.shards);
    if (given !== wanted) differ += 1;
    console.log(given === wanted ? `${name}: as expected` : `${name}: expected ${wanted}, found ${given}`);
  }
  return differ ? 1 : 0;
}

async function main() {
  let words;
  try {
    words = parseArgs({
      allowPositionals: true,
      options: {
        keys: { type: "string", default: "" },
        topic: { type: "string" },
        json: { type: "boolean", default: false },
        vectors: { type: "string" },
      },
    });
  } catch (error) {
    throw new Usage(error.message);
  }
  const { keys, topic, json, vectors } = words.values;
  if (vectors !== undefined) return readVectors(vectors);
  if (words.positionals.length > 1) throw new Usage("give one FILE, or none for standard input");
  const [file = "-"] = words.positionals;
  const known = keysOf(keys);
  const input = file === "-" ? process.stdin : createReadStream(file);
  const dump = await read(linesIn(input), known, topic);
  const shards = [...dump.shards.values()];
  if (json) console.log(JSON.stringify({ topic: dump.topic ?? null, keys, shards: found(dump) }, null, 1));
  else for (const shard of shards) console.log(shard.words);
  return shards.every((shard) => shard.verdict === "whole") ? 0 : 1;
}

try {
  process.exitCode = await main();
} catch (error) {
  if (!(error instanceof Usage || error.syscall)) throw error;
  console.error(`verify-journal: ${error.message}`);
  process.exitCode = 2;
}
