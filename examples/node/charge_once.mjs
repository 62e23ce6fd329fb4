// A worker in Node that shares its records with workers in Python. Run it:
// node examples/node/charge_once.mjs redis://localhost:6379/0 pay_7f3a

import { Redis, Store, runOnce } from "./onefold.mjs";

const [url = "redis://localhost:6379/0", key = "pay_7f3a"] = process.argv.slice(2);
const redis = await Redis.connect(url);

const charge = async () => {
  console.log(`charging ${key}`);
  return { receipt: 17 };
};

const outcome = await runOnce(new Store(redis), { operation: "charge", key }, charge, { lease: 30, keep: 86400, wait: 5 });
console.log(outcome.replayed ? "it was done before:" : "done:", outcome.value);
redis.close();
