// The other side of the tests: does what each line of its input says, all at once, and answers in a line for each.

import fs from "node:fs";
import readline from "node:readline";

import * as onefold from "../../examples/node/onefold.mjs";

const redis = await onefold.Redis.connect(process.argv[2]);
// What was done is counted by another connection, in a list that no record knows.
const ledger = await onefold.Redis.connect(process.argv[2]);
const store = new onefold.Store(redis);
const gates = new Map();

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const hex = (bytes) => bytes && Buffer.from(bytes).toString("hex");
const claimOf = ({ token, ...rest }) => ({ ...rest, token: Buffer.from(token, "hex") });

async function deliver({ id, address, value = null, gated = false, fails = false, ...terms }) {
  const handler = async ({ attempt }) => {
    if (gated) {
      const opened = new Promise((resolve) => gates.set(id, resolve));
      say({ id, began: attempt });
      await opened;
    }
    if (fails) throw new TypeError("as the test says");
    await ledger.call("RPUSH", "effects", `${address.key} node`);
    return value;
  };
  return onefold.runOnce(store, address, handler, terms);
}

const actions = {
  run: deliver,
  open: ({ gate }) => gates.get(gate)(),
  cut: () => new Promise((resolve) => redis.socket.once("close", resolve).destroy()).then(() => null),
  seen: ({ address }) => store.seen(address),
  remember: ({ address, keep }) => store.remember(address, keep),
  extend: ({ address, claim }) => store.extend(address, claimOf(claim)),
  finish: ({ address, claim, value }) =>
    store.finish(address, claimOf(claim), { ttl: 60, result: onefold.encodeResult(value) }),
  release: ({ address, claim }) => store.release(address, claimOf(claim)),
  read: async ({ address }) => {
    const found = await store.read(address);
    return found && { state: found.state, attempt: found.attempt, revision: found.revision, token: hex(found.token) };
  },
  vectors: ({ path }) => check(JSON.parse(fs.readFileSync(path, "utf8"))),
};

// What Node reads and writes otherwise than the vectors say.
function check(vectors) {
  const wrong = [];
  const same = (what, found, wanted) => {
    if (JSON.stringify(found) !== JSON.stringify(wanted)) wrong.push({ what, found, wanted });
  };
  for (const vector of vectors.addresses) {
    same("address", hex(onefold.packed(vector)), vector.address);
    same("digest", onefold.digest(vector), vector.digest);
    same("redis_key", hex(onefold.redisKey(vector)), vector.redis_key);
  }
  for (const vector of vectors.fingerprints.filter((one) => "payload" in one)) {
    same("encoded", hex(onefold.pack(vector.payload, true)), vector.encoded);
    same("fingerprint", hex(onefold.fingerprint(vector, vector.payload)), vector.fingerprint);
  }
  for (const vector of vectors.results) {
    same("result", hex(onefold.encodeResult(vector.value)), vector.result);
    same("value", onefold.decodeResult(Buffer.from(vector.result, "hex")), vector.value);
  }
  for (const { stored, record } of vectors.entries) {
    const head = Buffer.alloc(16);
    head.writeDoubleBE(stored.redis.now);
    head.writeDoubleBE(stored.redis.pttl, 8);
    const found = onefold.readRecord(Buffer.concat([head, Buffer.from(stored.redis.value, "hex")]));
    const { leaseLeft, ttlLeft, ...rest } = found;
    for (const name of ["token", "fingerprint", "notes", "result"]) rest[name] = hex(rest[name]);
    for (const name of Object.keys(rest)) same(name, rest[name], record[name]);
    same("lease_left", leaseLeft, record.lease_left);
    same("ttl_left", ttlLeft === Infinity ? null : ttlLeft, record.ttl_left);
  }
  return wrong;
}

say({ ready: true });
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { id, do: action, ...rest } = JSON.parse(line);
  Promise.resolve()
    .then(() => actions[action]({ id, ...rest }))
    .then((answer) => say({ id, answer: answer ?? null }))
    .catch((error) => say({ id, error: error.constructor.name, message: error.message }));
}
redis.close();
ledger.close();
