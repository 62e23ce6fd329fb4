"""What has to be asked of a store: whether it answers, how far its purge is behind, how many keys it has lost.

Exporters ask at each scrape, so a store is asked once for all of it. One that does not answer is down, and nothing
else. It writes no record.
"""

from __future__ import annotations

import inspect
import logging
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
        self._told: dict[str, tuple[float, Facts | None]] = {}

    def readings(self, metric: Metric) -> Iterator[Reading]:
        """What every store says of this metric now; one that cannot say is left out."""
        for name in self._sources:
            value = QUESTIONS[metric](self._facts(name))
            if value is not None:
                yield Reading(metric, name, value)

    def _facts(self, name: str) -> Facts | None:
        """What the store says of itself; None: it does not answer."""
        asked, told = self._told.get(name, (-FRESH_SECONDS, None))
        if time.monotonic() - asked >= FRESH_SECONDS:
            told = self._ask(name)
            self._told[name] = (time.monotonic(), told)
        return told

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
