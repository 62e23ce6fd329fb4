"""Eight processes, one store, random kills: whether the effects are those that `docs/guarantees.md` promises.

A queue in the parent delivers each message at least once, many of them twice, to workers that are killed (and, in claim
mode, stopped past their lease) at random moments; with `--strike-server` the store's server is killed too, and comes
back. With `--cancel` deliveries are tasks, on every async driver, and are cancelled at random: once, repeatedly, and by
anyio's scopes. A delivery comes again until it is acknowledged. At the end every message is looked up in what the
effects left behind, never in what a worker says.

`python -m bench.soak` exits with 1 on the first promise that does not hold, and keeps the files as evidence.
`--without-guard` must fail.
"""
