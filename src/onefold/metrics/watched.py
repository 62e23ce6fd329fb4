"""Query stores for metrics: whether they answer, what is held or abandoned, how far their purge is behind.

Exporters query at each scrape, so a store is queried once for everything. One that does not answer is down: a scrape
never waits for it longer than `PATIENCE`. It writes no record, and creates no tables.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from onefold import AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold.keys import address
from onefold.metrics.table import ABANDONED_RECORDS, EVICTED, HELD_RECORDS, PURGE_LAG, STORE_UP, Metric, Operations
from onefold.stores.base import Inspectable, Store, Untold
from onefold.stores.kinds import has_async_driver

# An address that nobody has: reading it shows whether the store answers.
NOBODY: Final = address("onefold-watch", "nobody")

# A store's answer serves all metrics of one scrape.
FRESH_SECONDS: Final = 1.0

# For all stores together. Prometheus abandons a scrape after ten seconds, and with it every metric of the process: a
# store that hangs would hide that it does.
PATIENCE: Final = 3.0

Facts = Mapping[str, Any]


class Reading(NamedTuple):
    """The value of one metric of one store, now."""

    metric: Metric
    # The values of the metric's labels: the store's name and, for some, an operation.
    labels: tuple[str, ...]
    value: float


class Watched:
    """Stores by name; each is a sync store, a URL or whatever a `Guard` takes. Opened when they are first queried."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        for name, store in stores.items():
            _check(name, store)
        self._sources = dict(stores)
        self._stores: dict[str, Any] = {}
        self._questions: dict[str, Question] = {}
        self._asked = -FRESH_SECONDS
        self._told: dict[str, Facts | None] = {}
        self._operations: dict[str, Operations] = {name: Operations() for name in stores}

    def readings(self, metric: Metric) -> Iterator[Reading]:
        """Yield the values of this metric for every store that has one now."""
        for name, facts in self._facts().items():
            value = QUESTIONS[metric](facts)
            if isinstance(value, Mapping):
                for operation, count in self._by_operation(name, value).items():
                    yield Reading(metric, (name, operation), count)
            elif value is not None:
                yield Reading(metric, (name,), value)

    def _by_operation(self, store: str, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the counts by label. An operation that was counted before is zero now, not gone."""
        operations = self._operations[store]
        found = dict.fromkeys(operations.known, 0.0)
        for operation, count in counts.items():
            label = operations.label(operation)
            found[label] = found.get(label, 0.0) + count
        return found

    def _facts(self) -> Mapping[str, Facts | None]:
        """Return the facts of each store; None if it does not answer."""
        if time.monotonic() - self._asked >= FRESH_SECONDS:
            self._told = self._ask_all()
            self._asked = time.monotonic()
        return self._told

    def _ask_all(self) -> dict[str, Facts | None]:
        """Query all stores concurrently. Skip one that has not answered the last query."""
        end = time.monotonic() + PATIENCE
        for name in self._sources:
            if name not in self._questions or not self._questions[name].is_alive():
                self._questions[name] = Question(name, self._ask)
        return {name: self._questions[name].answer(end) for name in self._sources}

    def _ask(self, name: str) -> Facts | None:
        try:
            source = self._sources[name]
            if isinstance(source, str) and has_async_driver(source):
                # In an event loop of its own, on a new connection: the machine may not have the sync driver.
                import asyncio

                return asyncio.run(_facts_of_async(source))
            return _facts_of(self._opened(name))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one store, the others are queried too
            logging.getLogger("onefold").warning("the watched store %s did not answer: %s", name, error)
            return None

    def _opened(self, name: str) -> Any:
        if name not in self._stores:
            source = self._sources[name]
            self._stores[name] = source if isinstance(source, Store) else Guard(source).store
        return self._stores[name]

    def close(self) -> None:
        """Close the stores that were opened here; the next query opens them again."""
        stores, self._stores = self._stores, {}
        for name, store in stores.items():
            if store is not self._sources[name]:
                store.close()


def _facts_of(store: Any) -> Facts:
    facts = store.facts() if isinstance(store, Inspectable) else {}
    if can_be_read(facts):
        store.read(NOBODY)
    return facts


async def _facts_of_async(url: str) -> Facts:
    async with AsyncGuard(url) as guard:
        store: Any = guard.store
        facts: Facts = await store.facts()
        if can_be_read(facts):
            await store.read(NOBODY)
        return facts


def can_be_read(facts: Facts) -> bool:
    """Return whether a read creates and upgrades nothing. Raise `StoreUnavailable` if there are no tables."""
    version = facts.get("version")
    if version == 0:
        raise StoreUnavailable(
            "there are no Onefold tables, and a scrape creates none. Is it the right store? A guard creates them with "
            "its first record, and `onefold schema --store URL --apply` at once"
        )
    return not isinstance(version, int) or version >= facts.get("newest", version)


class Question(threading.Thread):
    """A query to one store, in its own thread: a waiting driver cannot be told to stop."""

    def __init__(self, store: str, ask: Callable[[str], Facts | None]) -> None:
        super().__init__(name=f"onefold-watch-{store}", daemon=True)
        self._store, self._ask = store, ask
        self._told: Facts | None = None
        self.start()

    def run(self) -> None:
        self._told = self._ask(self._store)

    def answer(self, end: float) -> Facts | None:
        """Return the facts of the store, if it answers in time."""
        self.join(max(end - time.monotonic(), 0.0))
        if self.is_alive():
            logging.getLogger("onefold").warning("the watched store %s has not answered yet", self._store)
            return None
        return self._told


def _check(name: str, store: Any) -> None:
    """Raise `UsageError` for a store that cannot be queried at a scrape."""
    if inspect.iscoroutinefunction(getattr(store, "read", None)):
        raise UsageError(
            f"stores={{{name!r}: {type(store).__name__}}}: a scrape cannot await. Pass the URL, or a blocking store"
        )
    if isinstance(store, (str, Store)) or callable(store):
        return
    try:
        # A pool, an engine or a client: whether it makes a sync store is known without asking the server.
        Guard(store).store  # noqa: B018
    except UsageError as error:
        raise UsageError(
            f"stores={{{name!r}: ...}}: {error}. A scrape cannot await: pass the URL, or a blocking pool or engine"
        ) from error


def answers(facts: Facts | None) -> float:
    """Return whether the store answers at all: 1 or 0."""
    return 0.0 if facts is None else 1.0


def purge_lag(facts: Facts | None) -> float | None:
    """Return how long ago the oldest remaining record expired, in seconds; 0 if none has, None if unknown."""
    if facts is None or "expired_for" not in facts or isinstance(facts["expired_for"], Untold):
        return None
    return float(facts["expired_for"] or 0.0)


def evicted_keys(facts: Facts | None) -> float | None:
    """Return how many keys the store's servers have evicted since they started; None if unknown."""
    count = (facts or {}).get("evicted_keys")
    return None if count is None or isinstance(count, Untold) else float(count)


def held_records(facts: Facts | None) -> Mapping[str, float] | None:
    """Return how many records are held, by operation; None if unknown."""
    return _in_doubt(facts, 0)


def abandoned_records(facts: Facts | None) -> Mapping[str, float] | None:
    """Return how many runs are abandoned, by operation; None if unknown."""
    return _in_doubt(facts, 1)


def _in_doubt(facts: Facts | None, which: int) -> Mapping[str, float] | None:
    counts = (facts or {}).get("in_doubt")
    if counts is None or isinstance(counts, Untold):
        return None
    return {operation: float(both[which]) for operation, both in counts.items()}


QUESTIONS: Final[dict[Metric, Callable[[Facts | None], float | Mapping[str, float] | None]]] = {
    STORE_UP: answers,
    HELD_RECORDS: held_records,
    ABANDONED_RECORDS: abandoned_records,
    PURGE_LAG: purge_lag,
    EVICTED: evicted_keys,
}
