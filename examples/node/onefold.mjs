// Share records with Onefold on Redis or Valkey, from Node and without packages. `docs/record-format.md` describes
// every byte of it; `charge_once.mjs` beside this file uses it.
//
// The five operations are Onefold's own scripts (`src/onefold/stores/redis/lua`, `onefold/stores/redis/lua` in the
// wheel), sent as they are: the server compares and swaps, and this file decides as Onefold's `after_crash="rerun"` does.
// What it does not know (steps, running bypasses, holding what is in doubt) it leaves to a worker in Python.

import crypto from "node:crypto";
import fs from "node:fs";
import net from "node:net";

const LUA = new URL("../../src/onefold/stores/redis/lua/", import.meta.url);
const STATES = ["running", "open", "done", "failed", "held"];
const [OMITTED, WIDE, USUAL, UNUSUAL, LATER] = [8, 16, 32, 64, 128];
const NOTHING = Buffer.alloc(0);
const BEFORE = " | before: ";
const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/;
const PAUSE = 25;

export class InProgress extends Error {}
export class Held extends Error {}
export class RememberedFailure extends Error {}
export class ClaimLost extends Error {}

// Addresses.

export const packed = ({ scope = "", operation, key }) =>
  Buffer.concat([scope, operation, key].map((part) => Buffer.concat([uint(Buffer.byteLength(part), 2), Buffer.from(part)])));

export const digest = (address) => sha256(packed(address)).toString("hex").slice(0, 12);

export function redisKey({ scope = "", operation, key }, prefix = "onefold:") {
  const last = UUID.test(key) ? Buffer.from("ff" + key.replaceAll("-", ""), "hex") : Buffer.from(key);
  const parts = [scope, operation].flatMap((part) => [uint(Buffer.byteLength(part), 1), Buffer.from(part)]);
  return Buffer.concat([Buffer.from(prefix), ...parts, last]);
}

// The fingerprint of a payload that is one value, as `guard.run(..., payload=...)` computes it.
export function fingerprint({ scope = "", operation, key }, payload) {
  const head = Buffer.concat([uint(2, 1), sha256(Buffer.from("payload")).subarray(0, 3)]);
  const salt = Buffer.from([scope, operation, key].join("\0"));
  return Buffer.concat([head, sha256(Buffer.concat([salt, pack(payload, true)]))]);
}

// Results: a byte for the form (0: readable without a type), then MessagePack.

export const encodeResult = (value) => (value == null ? null : Buffer.concat([uint(0, 1), pack(value)]));

export function decodeResult(stored) {
  if (stored === null) return null;
  if (stored[0] > 1) throw new Error("a codec of its own wrote this result");
  return unpack(stored, { at: 1 });
}

// Records: the string of one record, after the server's time and its remaining TTL, as the scripts show it.

export function readRecord(shown) {
  const [now, left, value] = [shown.readDoubleBE(0), shown.readDoubleBE(8), shown.subarray(16)];
  const form = value[16];
  if (value.length < 24 || form & LATER || form % 8 >= STATES.length) throw new Error("written by a later version");
  const running = form % 8 === 0;
  let at = running ? 29 : 23;
  let [attempt, revision, bypasses] = [value[at] >> 4, value[at] % 16, 0];
  if (form & WIDE) [attempt, revision, bypasses] = [0, 4, 8].map((offset) => value.readUInt32BE(at + offset));
  at += form & WIDE ? 12 : 1;
  const size = form & UNUSUAL ? value.readUInt32BE(at) : form & USUAL ? 36 : 0;
  at += form & UNUSUAL ? 4 : 0;
  const print = form & (USUAL | UNUSUAL) ? value.subarray(at, at + size) : null;
  const contents = readContents(value.subarray(at + size));
  const leaseLeft = running ? (value.readUIntBE(23, 6) - now) / 1000 : 0;
  const age = (now - value.readUIntBE(17, 6)) / 1000;
  const head = { token: value.subarray(0, 16), state: STATES[form % 8], omitted: Boolean(form & OMITTED) };
  const times = { age, leaseLeft, ttlLeft: left < 0 ? Infinity : left / 1000 };
  return { ...head, ...times, attempt, revision, bypasses, fingerprint: print, ...contents };
}

function readContents(bytes) {
  if (bytes.length === 0) return { notes: null, result: null, remark: "" };
  let at = 0;
  const field = () => {
    const size = bytes.readUInt32BE(at);
    const found = size ? bytes.subarray(at + 4, at + 3 + size) : null;
    at += size ? 3 + size : 4;
    return found;
  };
  return { notes: field(), result: field(), remark: bytes.subarray(at).toString() };
}

const field = (bytes) => (bytes === null ? uint(0, 4) : Buffer.concat([uint(bytes.length + 1, 4), bytes]));

function contentsOf({ notes = null, result = null, remark = "" }) {
  if (notes === null && result === null && remark === "") return NOTHING;
  return Buffer.concat([field(notes), field(result), Buffer.from(remark)]);
}

function restOf({ attempt, revision = 1, bypasses = 0, fingerprint: print = null, ...contents }) {
  const wide = attempt > 15 || revision > 15 || bypasses > 0;
  const counts = wide ? Buffer.concat([attempt, revision, bypasses].map((count) => uint(count, 4))) : uint((attempt << 4) | revision, 1);
  const usual = print !== null && print.length === 36;
  const shown = print === null ? NOTHING : usual ? print : Buffer.concat([uint(print.length, 4), print]);
  const form = (wide ? WIDE : 0) | (print === null ? 0 : usual ? USUAL : UNUSUAL);
  return { form, rest: Buffer.concat([counts, shown, contentsOf(contents)]) };
}

// The operations. Durations are seconds, and Infinity is forever.

export class Store {
  constructor(redis, { prefix = "onefold:", scripts = LUA } = {}) {
    const text = (...names) => names.map((name) => fs.readFileSync(new URL(`${name}.lua`, scripts))).join("");
    Object.assign(this, { redis, prefix });
    this.scripts = { claim: text("record", "claim"), read: text("record", "read") };
    for (const name of ["extend", "finish", "release"]) this.scripts[name] = text("record", "parts", name);
  }

  call(name, address, ...args) {
    return this.redis.call("EVAL", this.scripts[name], "1", redisKey(address, this.prefix), ...args);
  }

  // null: it is ours. "gone": what it wanted to replace is gone. Else the record in the way.
  async claim(address, { token, lease, ttl, age = 0, state = "running", ...entry }, replacing = null) {
    const { form, rest } = restOf(entry);
    const head = Buffer.concat([token, uint(STATES.indexOf(state) | form, 1)]);
    const seen = replacing === null ? [] : [replacing.token, String(replacing.revision)];
    const until = state === "running" ? milliseconds(lease) : "";
    const reply = await this.call("claim", address, head, milliseconds(age), until, milliseconds(ttl), rest, ...seen);
    return reply === 1 ? null : reply === 0 ? "gone" : readRecord(reply);
  }

  async extend(address, { token, lease, ttl }) {
    return (await this.call("extend", address, token, milliseconds(lease), milliseconds(ttl))) === 1;
  }

  async finish(address, { token }, { state = "done", ttl, ...contents }) {
    const args = [milliseconds(ttl), String(STATES.indexOf(state)), "0", contentsOf(contents)];
    return (await this.call("finish", address, token, ...args)) === 1;
  }

  // Without `left` the record is removed: the next delivery is the first one.
  async release(address, { token }, left = null) {
    const args = left === null ? [] : [milliseconds(left.ttl), String(left.attempt), field(left.notes), left.remark];
    return (await this.call("release", address, token, ...args)) === 1;
  }

  async read(address) {
    const shown = await this.call("read", address);
    return shown === null ? null : readRecord(shown);
  }

  // A seen-set: only what is finished.

  async seen(address) {
    const found = await this.read(address);
    return found !== null && found.state === "done";
  }

  // What is running, held or finished stays as it is. What was released has happened now.
  async remember(address, keep) {
    const done = { token: crypto.randomBytes(16), state: "done", ttl: keep };
    const found = await this.claim(address, { ...done, attempt: 1 });
    if (found !== null && found.state === "open") await this.claim(address, { ...keptOf(found), ...done }, found);
  }
}

// One delivery: claim, run, finish. A duplicate gets the stored result, and one that is running is waited for.

export async function runOnce(store, address, handler, { lease = 30, keep = 86400, wait = 0, maxAttempts = 5 } = {}) {
  const terms = { lease, ttl: lease + keep };
  const token = crypto.randomBytes(16);
  const deadline = performance.now() + wait * 1000;
  let [entry, replacing] = [{ token, ...terms, attempt: 1 }, null];
  for (;;) {
    const found = await store.claim(address, entry, replacing);
    if (found === null) return close(store, address, entry, handler, keep);
    [entry, replacing] = [{ token, ...terms, attempt: 1 }, null];
    if (found === "gone") continue;
    const then = decide(found, maxAttempts);
    if (then.replay) return { value: decodeResult(found.result), replayed: true, attempt: found.attempt };
    if (then.wait && performance.now() >= deadline) throw new InProgress(digest(address));
    if (then.wait) await new Promise((resolve) => setTimeout(resolve, PAUSE));
    else [entry, replacing] = [{ token, ...terms, ...then.takeOver }, found];
  }
}

function decide(found, maxAttempts) {
  if (found.state === "done") return { replay: true };
  if (found.state === "failed") throw new RememberedFailure(decodeResult(found.result)?.message ?? found.remark);
  if (found.state === "held") throw new Held(found.remark);
  // A batch in Python claims messages before it starts their handlers: such an attempt does not count.
  const unstarted = found.notes !== null && found.notes.equals(Buffer.from("c0", "hex"));
  const marked = unstarted || (found.notes !== null && found.notes.equals(Buffer.from("80", "hex")));
  const steps = found.notes !== null && !marked;
  const attempts = found.attempt - (unstarted ? 1 : 0);
  const live = found.state === "running" && found.leaseLeft > 0;
  const used = found.state === "running" && !unstarted && attempts >= maxAttempts;
  // Steps, a bypass that died, and attempts that are used up are decided by a worker that knows them.
  if (live || steps || used || (found.state === "running" && found.bypasses > 0)) return { wait: true };
  return { takeOver: { ...keptOf(found), attempt: attempts + 1 } };
}

// What a later run keeps of the record that it replaces: the history behind the remark, too.
function keptOf({ age, attempt, bypasses, fingerprint: print, remark }) {
  const at = remark.startsWith("resolved as ") ? 0 : remark.indexOf(BEFORE);
  const history = at < 0 ? "" : at === 0 && !remark.startsWith(BEFORE) ? BEFORE + remark : remark.slice(at);
  return { age, attempt, bypasses, fingerprint: print, remark: history };
}

async function close(store, address, entry, handler, keep) {
  let lost = false;
  const beat = setInterval(async () => {
    lost ||= !(await store.extend(address, entry).catch(() => true));
  }, (entry.lease * 1000) / 3);
  let value;
  try {
    value = await handler({ attempt: entry.attempt, isLost: () => lost });
  } catch (error) {
    const left = { ttl: keep, attempt: entry.attempt, notes: null, remark: `released: ${error.name}${entry.remark ?? ""}` };
    // If the store fails now, the lease will end. The handler's own error is the one to show.
    await store.release(address, entry, entry.attempt > 1 || entry.bypasses ? left : null).catch(() => {});
    throw error;
  } finally {
    clearInterval(beat);
  }
  const ending = { ttl: keep, result: encodeResult(value), remark: entry.remark ?? "" };
  if (!(await store.finish(address, entry, ending))) throw new ClaimLost(digest(address));
  return { value: value ?? null, replayed: false, attempt: entry.attempt };
}

// MessagePack, as far as JSON goes. `sorted` writes the members of objects in the order of their bytes.

export function pack(value, sorted = false) {
  if (value === null || value === undefined) return uint(0xc0, 1);
  if (typeof value === "boolean") return uint(value ? 0xc3 : 0xc2, 1);
  if (typeof value === "number") return Number.isSafeInteger(value) ? packInteger(value) : float(value);
  if (typeof value === "string") {
    const text = Buffer.from(value);
    return Buffer.concat([header(text.length, [[0xa0, 32], [0xd9, 0x100], [0xda, 0x10000], [0xdb]]), text]);
  }
  if (Buffer.isBuffer(value)) {
    return Buffer.concat([header(value.length, [[0xc4, 0x100], [0xc5, 0x10000], [0xc6]].map(([c, m]) => [c, m, true])), value]);
  }
  if (Array.isArray(value)) {
    return Buffer.concat([collection(value.length, 0x90, 0xdc), ...value.map((member) => pack(member, sorted))]);
  }
  const names = Object.keys(value);
  if (sorted) names.sort((one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other)));
  return Buffer.concat([collection(names.length, 0x80, 0xde), ...names.flatMap((name) => [pack(name), pack(value[name], sorted)])]);
}

const collection = (size, small, large) =>
  size < 16 ? uint(small | size, 1) : Buffer.concat([uint(size < 0x10000 ? large : large + 1, 1), uint(size, size < 0x10000 ? 2 : 4)]);

function header(size, forms) {
  if (forms[0].length === 2 && size < forms[0][1]) return uint(forms[0][0] | size, 1);
  const sizes = forms[0].length === 2 ? forms.slice(1) : forms;
  const index = sizes.findIndex(([, most]) => most === undefined || size < most);
  return Buffer.concat([uint(sizes[index][0], 1), uint(size, 2 ** index)]);
}

function float(value) {
  const bytes = Buffer.alloc(9, 0xcb);
  bytes.writeDoubleBE(value, 1);
  return bytes;
}

function packInteger(value) {
  if (value >= 0 && value < 128) return uint(value, 1);
  if (value < 0 && value >= -32) return uint(value + 256, 1);
  const bits = [8, 16, 32, 64].find((size) => (value >= 0 ? value < 2 ** size : value >= -(2 ** (size - 1))));
  const bytes = Buffer.alloc(9);
  bytes[0] = (value >= 0 ? 0xcc : 0xd0) + Math.log2(bits / 8);
  bytes.writeBigInt64BE(BigInt(value), 1);
  return Buffer.concat([bytes.subarray(0, 1), bytes.subarray(9 - bits / 8)]);
}

export function unpack(bytes, cursor = { at: 0 }) {
  const take = (size) => bytes.subarray(cursor.at, (cursor.at += size));
  const number = (size) => take(size).readUIntBE(0, size);
  const members = (size) => Array.from({ length: size }, () => unpack(bytes, cursor));
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => members(2)));
  const code = number(1);
  if (code < 0x80) return code;
  if (code >= 0xe0) return code - 256;
  if (code < 0x90) return map(code % 16);
  if (code < 0xa0) return members(code % 16);
  if (code < 0xc0) return take(code % 32).toString();
  const forms = {
    0xc0: () => null, 0xc2: () => false, 0xc3: () => true,
    0xc4: () => take(number(1)), 0xc5: () => take(number(2)), 0xc6: () => take(number(4)),
    0xca: () => take(4).readFloatBE(), 0xcb: () => take(8).readDoubleBE(),
    0xcc: () => number(1), 0xcd: () => number(2), 0xce: () => number(4), 0xcf: () => Number(take(8).readBigUInt64BE()),
    0xd0: () => take(1).readInt8(), 0xd1: () => take(2).readInt16BE(), 0xd2: () => take(4).readInt32BE(),
    0xd3: () => Number(take(8).readBigInt64BE()),
    0xd9: () => take(number(1)).toString(), 0xda: () => take(number(2)).toString(), 0xdb: () => take(number(4)).toString(),
    0xdc: () => members(number(2)), 0xdd: () => members(number(4)), 0xde: () => map(number(2)), 0xdf: () => map(number(4)),
  };
  if (!(code in forms)) throw new Error(`MessagePack ${code} is not plain data`);
  return forms[code]();
}

const sha256 = (bytes) => crypto.createHash("sha256").update(bytes).digest();

function uint(value, size) {
  const bytes = Buffer.alloc(size);
  bytes.writeUIntBE(value, 0, size);
  return bytes;
}

// Rounded up, because nothing may end too early. Empty: forever.
const milliseconds = (seconds) => {
  if (typeof seconds !== "number" || Number.isNaN(seconds)) {
    throw new TypeError(`a duration is a number of seconds, or Infinity, and not ${JSON.stringify(seconds)}`);
  }
  return seconds === Infinity ? "" : String(Math.max(0, Math.ceil(seconds * 1000)));
};

// A client of Redis, as far as this file needs one. A lost connection fails what waits for an answer, and what comes after.

export class Redis {
  static async connect(url) {
    const { hostname, port, password, username, pathname } = new URL(url);
    const redis = new Redis(net.connect({ host: hostname, port: Number(port || 6379), noDelay: true }));
    if (password) await redis.call("AUTH", ...(username ? [username] : []), decodeURIComponent(password));
    if (pathname.length > 1) await redis.call("SELECT", pathname.slice(1));
    return redis;
  }

  constructor(socket) {
    Object.assign(this, { socket, waiting: [], unread: NOTHING, lost: null });
    socket.on("data", (bytes) => this.heard(bytes));
    socket.on("error", (error) => this.failed(error));
    socket.on("close", () => this.failed(new Error("the connection was closed")));
  }

  call(...words) {
    if (this.lost) return Promise.reject(this.lost);
    const bytes = words.map((word) => (Buffer.isBuffer(word) ? word : Buffer.from(word)));
    const parts = bytes.flatMap((word) => [Buffer.from(`$${word.length}\r\n`), word, Buffer.from("\r\n")]);
    this.socket.write(Buffer.concat([Buffer.from(`*${bytes.length}\r\n`), ...parts]));
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  close() {
    this.socket.end();
  }

  heard(bytes) {
    this.unread = Buffer.concat([this.unread, bytes]);
    for (;;) {
      const cursor = { at: 0 };
      const reply = parsed(this.unread, cursor);
      if (reply === undefined) return;
      this.unread = this.unread.subarray(cursor.at);
      const { resolve, reject } = this.waiting.shift();
      if (reply instanceof Error) reject(reply);
      else resolve(reply);
    }
  }

  failed(error) {
    this.lost ??= error;
    for (const { reject } of this.waiting.splice(0)) reject(error);
  }
}

// undefined: there is more to come.
function parsed(bytes, cursor) {
  const end = bytes.indexOf("\r\n", cursor.at);
  if (end < 0) return undefined;
  const [kind, text] = [String.fromCharCode(bytes[cursor.at]), bytes.toString("utf8", cursor.at + 1, end)];
  cursor.at = end + 2;
  if (kind === "+") return text;
  if (kind === "-") return new Error(text);
  if (kind === ":") return Number(text);
  const size = Number(text);
  if (size < 0) return null;
  if (kind === "*") {
    const members = [];
    while (members.length < size) {
      const member = parsed(bytes, cursor);
      if (member === undefined) return undefined;
      members.push(member);
    }
    return members;
  }
  if (bytes.length < cursor.at + size + 2) return undefined;
  cursor.at += size + 2;
  return bytes.subarray(cursor.at - size - 2, cursor.at - 2);
}
