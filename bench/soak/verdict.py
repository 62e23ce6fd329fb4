"""The verdict: every message against what `docs/guarantees.md` promises for its mode and for what struck it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Final, NamedTuple

from bench.soak import losses
from bench.soak.plan import WORKERS
from bench.soak.queue import Queue
from bench.soak.workers import OPERATION, Desk
from onefold import Guard
from onefold.stores.base import Browsable, Query

PAGE: Final = 1_000


class Found(NamedTuple):
    """What a run left behind, by message."""

    starts: Counter[str]
    calls: Counter[str]
    keys: dict[str, set[str]]
    charges: Counter[str]
    balances: dict[str, int]
    states: dict[str, str]

    @property
    def held(self) -> list[str]:
        return [message for message, state in self.states.items() if state == "held"]

    @property
    def done(self) -> list[str]:
        return [message for message, state in self.states.items() if state == "done"]


NOTHING: Final = Found(Counter(), Counter(), {}, Counter(), {}, {})


def look(desk: Desk) -> Found:
    effects = desk.effects.seen()
    keys: dict[str, set[str]] = {}
    for message, key in effects.calls:
        keys.setdefault(message, set()).add(key)
    calls = Counter(message for message, _ in effects.calls)
    starts = Counter(desk.plan.journal.read_text().split())
    states = _states(desk.url) if desk.plan.guarded else {}
    return Found(starts, calls, keys, Counter(effects.charges), effects.balances, states)


def _states(url: str) -> dict[str, str]:
    states: dict[str, str] = {}
    with closing(Guard(url)) as guard:
        store, query = guard.store, Query(operation=OPERATION)
        assert isinstance(store, Browsable)
        while page := store.browse(query, PAGE):
            states |= {record.address.key: record.state.value for record in page}
            query = query._replace(after=page[-1].address)
    return states


def violations(queue: Queue, found: Found) -> Iterator[str]:
    """Every message that breaks a promise, with what was seen of it."""
    plan = queue.plan
    yield from queue.errors
    if queue.errors:
        return
    if queue.strikes:
        yield f"{len(queue.strikes)} strikes never came: this run proves less than it says"
    for message in plan.messages:
        for what in _wrong(queue, found, message.id):
            yield f"{message.id}: {what} ({_seen(queue, found, message.id)})"
    yield from _balances(queue, found)
    if queue.environment.loses:
        return
    yield from _too_many(queue, found)


def _wrong(queue: Queue, found: Found, id_: str) -> Iterator[str]:
    # Without a guard there are no records, and only the effects count.
    state = found.states.get(id_) if queue.plan.guarded else "done"
    if queue.environment.loses:
        yield from losses.inconsistent(queue.plan, found, id_)
        return
    match queue.plan.mode:
        case "transactional":
            yield from _wrong_transactional(found, id_, state)
        case "hold":
            yield from _wrong_under_hold(queue, found, id_, state)
        case "rerun":
            yield from _wrong_under_rerun(queue, found, id_, state)


def _wrong_transactional(found: Found, id_: str, state: str | None) -> Iterator[str]:
    """One effect, whatever strikes: both commit or neither."""
    if found.calls[id_] != 1:
        yield "its effect did not happen exactly once"
    if state != "done":
        yield "it has no record that says done"


def _wrong_under_hold(queue: Queue, found: Found, id_: str, state: str | None) -> Iterator[str]:
    """At most one run, whatever strikes; and a person is asked only about what was struck."""
    starts, calls = found.starts[id_], found.calls[id_]
    if calls > 1 or starts > 1:
        yield "it ran twice under hold"
    if state not in ("done", "held"):
        yield "it is neither done nor held"
    if state == "done" and not calls:
        yield "it is done without an effect"
    # A worker that was only stopped turns held into done when it continues.
    if state == "held" and not (queue.hits["kill"][id_] or queue.hits["outage"][id_]):
        yield "it is held, and neither a kill nor an outage hit it"


def _wrong_under_rerun(queue: Queue, found: Found, id_: str, state: str | None) -> Iterator[str]:
    """At least one run, one key downstream, and no second run without a reason."""
    if state != "done" or not found.calls[id_]:
        yield "it is not done"
    if found.charges[id_] != 1 or len(found.keys.get(id_, ())) != 1:
        yield "downstream, its key is not one"
    # A second start follows a worker that died, one that outlived its lease and was told so, or one that could not
    # tell the store before its lease ended and said so.
    if found.starts[id_] > 1 + queue.hits["kill"][id_] + queue.told[id_] + queue.forgotten[id_]:
        yield "a start that nothing explains"


def _balances(queue: Queue, found: Found) -> Iterator[str]:
    """The sums: of all messages; under hold, and where something is lost, of those whose effect is there."""
    plan, expected = queue.plan, Counter[str]()
    for message in plan.messages:
        if (plan.mode != "hold" and not queue.environment.loses) or found.calls[message.id]:
            expected[message.account] += message.amount
    for account, balance in found.balances.items():
        if balance != expected[account]:
            yield f"{account} has {balance}, and should have {expected[account]}"


def _too_many(queue: Queue, found: Found) -> Iterator[str]:
    """A kill leaves one delivery in doubt. An outage leaves at most the one that each worker had begun."""
    counts, forgotten = queue.counts, queue.forgotten.total()
    left_by_outages = WORKERS * counts["server"]
    if len(found.held) > counts["kill"] + left_by_outages:
        yield f"{len(found.held)} messages are held, after {counts['kill']} kills and {counts['server']} of the server"
    if queue.environment.has_server and forgotten > left_by_outages:
        yield f"{forgotten} runs were not remembered, and the server was killed {counts['server']} times"


def _seen(queue: Queue, found: Found, id_: str) -> str:
    seen = {"effects": found.calls[id_], "record": found.states.get(id_)}
    if queue.plan.mode != "transactional":
        seen |= {"starts": found.starts[id_], "told lost": queue.told[id_], "not remembered": queue.forgotten[id_]}
    seen |= {f"{kind}s that hit it": hits[id_] for kind, hits in queue.hits.items() if hits}
    return ", ".join(f"{name} {value}" for name, value in seen.items())


def leave_evidence(queue: Queue, found: Found, wrong: list[str]) -> None:
    """All that is known of a run that failed, beside its files."""
    folder = queue.plan.folder
    (folder / "violations.txt").write_text("\n".join(wrong) + "\n")
    seen = {message.id: _seen(queue, found, message.id) for message in queue.plan.messages}
    (folder / "messages.json").write_text(json.dumps(seen, indent=1))
    queue.environment.leave_evidence(folder)
