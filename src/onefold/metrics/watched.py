"""What has to be asked of a store: whether it answers, how far its purge is behind, how many keys it has lost.

Exporters ask at each scrape, so a store is asked once for all of it. One that does not answer is down, and nothing
else: a scrape never waits for it longer than `PATIENCE`. It writes no record.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from onefold import Guard, UsageError
from onefold.keys import address
from onefold.metrics.table import EVICTED, PURGE_LAG, STORE_UP, Metric
from onefold.stores.base import Inspectable, Store, Untold

# An address that nobody has: reading it shows whether the store answers.
NOBODY: Final = address("onefold-watch", "nobody")

# What a store has said is good for all metrics of one scrape.
FRESH_SECONDS: Final = 1.0

# For all stores together. Prometheus gives a scrape up after ten seconds, and with it every metric of the process: a
# store that hangs would hide that it does.
PATIENCE: Final = 3.0

Facts = Mapping[str, Any]


class Reading(NamedTuple):
    """The value of one metric of one store, now."""

    metric: Metric
    store: str
    value: float


class Watched:
    """Stores by name; each is a blocking store, a URL or whatever a `Guard` takes. Opened when they are first asked."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        for name, store in stores.items():
            _check(name, store)
        self._sources = dict(stores)
        self._stores: dict[str, Any] = {}
        self._questions: dict[str, Question] = {}
        self._asked = -FRESH_SECONDS
        self._told: dict[str, Facts | None] = {}

    def readings(self, metric: Metric) -> Iterator[Reading]:
        """What every store says of this metric now; one that cannot say is left out."""
        for name, facts in self._facts().items():
            value = QUESTIONS[metric](facts)
            if value is not None:
                yield Reading(metric, name, value)

    def _facts(self) -> Mapping[str, Facts | None]:
        """What each store says of itself; None: it does not answer."""
        if time.monotonic() - self._asked >= FRESH_SECONDS:
            self._told = self._ask_all()
            self._asked = time.monotonic()
        return self._told

    def _ask_all(self) -> dict[str, Facts | None]:
        """All at the same time. One that has not answered the last question is not asked another."""
        end = time.monotonic() + PATIENCE
        for name in self._sources:
            if name not in self._questions or not self._questions[name].is_alive():
                self._questions[name] = Question(name, self._ask)
        return {name: self._questions[name].answer(end) for name in self._sources}

    def _ask(self, name: str) -> Facts | None:
        try:
            store = self._opened(name)
            store.read(NOBODY)
            return store.facts() if isinstance(store, Inspectable) else {}
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one store, the others are asked too
            logging.getLogger("onefold").warning("the watched store %s did not answer: %s", name, error)
            return None

    def _opened(self, name: str) -> Any:
        if name not in self._stores:
            source = self._sources[name]
            self._stores[name] = source if isinstance(source, Store) else Guard(source).store
        return self._stores[name]


class Question(threading.Thread):
    """One store, asked in a thread of its own: a driver that waits cannot be told to stop."""

    def __init__(self, store: str, ask: Callable[[str], Facts | None]) -> None:
        super().__init__(name=f"onefold-watch-{store}", daemon=True)
        self._store, self._ask = store, ask
        self._told: Facts | None = None
        self.start()

    def run(self) -> None:
        self._told = self._ask(self._store)

    def answer(self, end: float) -> Facts | None:
        """What the store says of itself, if it says so before this moment."""
        self.join(max(end - time.monotonic(), 0.0))
        if self.is_alive():
            logging.getLogger("onefold").warning("the watched store %s has not answered yet", self._store)
            return None
        return self._told


def _check(name: str, store: Any) -> None:
    """Raise `UsageError` for what cannot be asked at a scrape."""
    if inspect.iscoroutinefunction(getattr(store, "read", None)):
        raise UsageError(
            f"stores={{{name!r}: {type(store).__name__}}}: a scrape cannot await. Pass the URL, or a blocking store"
        )


def answers(facts: Facts | None) -> float:
    """Whether the store answers at all: 1 or 0."""
    return 0.0 if facts is None else 1.0


def purge_lag(facts: Facts | None) -> float | None:
    """Seconds since the oldest record that is still there went past its stay; 0: none is. None: it cannot say."""
    if facts is None or "expired_for" not in facts or isinstance(facts["expired_for"], Untold):
        return None
    return float(facts["expired_for"] or 0.0)


def evicted_keys(facts: Facts | None) -> float | None:
    """How many keys the servers of a Redis have evicted since they started. None: no Redis, or it does not say."""
    infos = [server["info"] for server in (facts or {}).get("servers", ())]
    told = [info["evicted_keys"] for info in infos if not isinstance(info, Untold) and "evicted_keys" in info]
    return sum(float(count) for count in told) if told else None


QUESTIONS: Final[dict[Metric, Callable[[Facts | None], float | None]]] = {
    STORE_UP: answers,
    PURGE_LAG: purge_lag,
    EVICTED: evicted_keys,
}
