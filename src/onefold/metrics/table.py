"""Every metric, and the counters of each event. Pure: exporters, documentation and `ops/` follow this table.

Labels are the operation, the outcome, for senders the hop (a queue, a topic), and for stores a name and the call. Never
a key, a scope or a digest: their number is unbounded, and they may be personal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from onefold.events import Event, Kind

# A monitoring system keeps a series for each value of a label: operations beyond this number are "other".
OPERATIONS_MAX: Final = 100
OTHER: Final = "other"

# In seconds. A memory store answers in microseconds, a database in milliseconds, and timeouts end at some seconds.
BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metric(NamedTuple):
    """One metric: its name as Prometheus writes it, and its description."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str

    @property
    def unit(self) -> str:
        """Return the unit for OpenTelemetry.

        Not "1": its Prometheus exporters would turn that gauge into a `_ratio`.
        """
        return "s" if self.name.endswith("_seconds") else ""

    @property
    def dotted(self) -> str:
        """Return the name in OpenTelemetry; its Prometheus exporter rebuilds `name` from it and the unit."""
        return self.name.removesuffix("_total").removesuffix("_seconds").replace("_", ".", 1)


_OPERATION: Final = ("operation",)
_STORE: Final = ("store",)

DELIVERIES: Final = Metric("onefold_deliveries_total", "counter", ("operation", "outcome"), "Deliveries, by outcome.")
CONFLICTS: Final = Metric(
    "onefold_conflicts_total", "counter", _OPERATION, "A key came again with another payload, and was refused."
)
STORE_SECONDS: Final = Metric(
    "onefold_store_seconds", "histogram", ("store", "call", "result"), "How long calls of a measured store took."
)
STORE_UP: Final = Metric(
    "onefold_store_up", "gauge", _STORE, "Whether a watched store answered and has its tables: 1 or 0."
)
PURGE_LAG: Final = Metric(
    "onefold_purge_lag_seconds", "gauge", _STORE, "How long the oldest expired record has waited for a purge."
)
EVICTED: Final = Metric(
    "onefold_evicted_keys_total",
    "counter",
    _STORE,
    "Keys that a Redis has evicted for lack of memory since it started.",
)

HELD_RECORDS: Final = Metric(
    "onefold_held_records", "gauge", ("store", "operation"), "Records that are held now: a person has to resolve them."
)
ABANDONED_RECORDS: Final = Metric(
    "onefold_abandoned_records",
    "gauge",
    ("store", "operation"),
    "Runs whose lease is over now, and whose record does not expire: nothing happens before the next delivery.",
)

_HOP: Final = ("hop",)
SENDS: Final = Metric(
    "onefold_sends_total",
    "counter",
    _HOP,
    "Messages that senders of `onefold.queues` gave to a broker, retries included.",
)
SENT_KEYS: Final = Metric(
    "onefold_sent_keys_total",
    "counter",
    _HOP,
    "Sends under a key that this process had not sent before, as far as it remembers.",
)

# The metric that counts an event of this kind, in addition to the outcome of its delivery.
COUNTED: Final[dict[Kind, Metric]] = {
    Kind.STARTED: Metric("onefold_starts_total", "counter", _OPERATION, "Handlers that were started."),
    Kind.REPLAYED: Metric(
        "onefold_duplicates_total", "counter", _OPERATION, "Duplicates absorbed: answered from the record."
    ),
    Kind.WAITED: Metric(
        "onefold_waits_total", "counter", _OPERATION, "Duplicates that waited for the running one, and were answered."
    ),
    Kind.TAKEN_OVER: Metric(
        "onefold_takeovers_total",
        "counter",
        _OPERATION,
        "Runs that another delivery took over: their lease had ended, or they were cancelled.",
    ),
    Kind.LOST: Metric(
        "onefold_lost_claims_total",
        "counter",
        _OPERATION,
        "Handlers that continued after another delivery took over their claim.",
    ),
    Kind.HELD: Metric(
        "onefold_held_total", "counter", _OPERATION, "Records that became held: their outcome is unknown."
    ),
    Kind.RESOLVED: Metric("onefold_resolved_total", "counter", _OPERATION, "Records that were resolved."),
    Kind.NOT_RECORDED: Metric(
        "onefold_not_recorded_total",
        "counter",
        _OPERATION,
        "Effects that happened, but could not be recorded in the store.",
    ),
    Kind.UNPROTECTED: Metric(
        "onefold_unprotected_total", "counter", _OPERATION, "Handlers that ran without a claim: the store was down."
    ),
    Kind.STORE_FAILED: Metric(
        "onefold_store_failures_total", "counter", _OPERATION, "Calls of a store that failed during a delivery."
    ),
    Kind.NOT_RENEWED: Metric(
        "onefold_late_renewals_total",
        "counter",
        _OPERATION,
        "Renewals of a claim that failed or were late, while the handler ran.",
    ),
    Kind.OMITTED: Metric("onefold_omitted_results_total", "counter", _OPERATION, "Results that were not kept."),
    Kind.BYPASSED: Metric("onefold_bypasses_total", "counter", _OPERATION, "Deliberate second runs."),
    Kind.BURIED: Metric(
        "onefold_buried_total", "counter", _OPERATION, "Messages that went to the dead letters, or were given up."
    ),
    Kind.UNREAD: Metric(
        "onefold_unread_partitions_total",
        "counter",
        _OPERATION,
        "Checks of a Kafka partition that had messages, and from which its consumer had read nothing for a minute.",
    ),
}

METRICS: Final = (
    DELIVERIES,
    *COUNTED.values(),
    CONFLICTS,
    SENDS,
    SENT_KEYS,
    STORE_SECONDS,
    STORE_UP,
    HELD_RECORDS,
    ABANDONED_RECORDS,
    PURGE_LAG,
    EVICTED,
)

# How a delivery ended, by the event that ended it.
OUTCOMES: Final[dict[Kind, str]] = {
    Kind.FINISHED: "done",
    Kind.REPLAYED: "replayed",
    Kind.SKIPPED: "skipped",
    Kind.FAILED: "failed",
    Kind.RELEASED: "released",
    Kind.LEFT: "left",
    Kind.HELD: "held",
    Kind.LOST: "lost",
    Kind.NOT_RECORDED: "not_recorded",
    Kind.UNPROTECTED: "unprotected",
}

# A refusal, by the error that the caller got.
REFUSALS: Final = {
    "KeyReused": "key_reused",
    "InProgress": "in_progress",
    "Held": "still_held",
    "StoreUnavailable": "store_unavailable",
    "ProbeFailed": "probe_failed",
}
REFUSED: Final = "refused"

# The prefix of an event's detail that concerns a part of a handler, and ends no delivery.
STEP: Final = "step "


def outcome(event: Event) -> str | None:
    """Return the outcome of the delivery, if this event ends it."""
    if event.kind is Kind.REFUSED:
        return REFUSALS.get(event.detail, REFUSED)
    return None if event.detail.startswith(STEP) else OUTCOMES.get(event.kind)


def counted(event: Event, operation: str) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Yield the counters that this event increments, with their labels."""
    ended = outcome(event)
    if ended is not None:
        yield DELIVERIES, (operation, ended)
    metric = COUNTED.get(event.kind)
    if metric is not None:
        yield metric, (operation,)
    if event.kind is Kind.UNPROTECTED:
        # Its handler is started as well, without another event.
        yield COUNTED[Kind.STARTED], (operation,)
    if ended == REFUSALS["KeyReused"]:
        yield CONFLICTS, (operation,)


class Operations:
    """The operations that have their own series: the first ones, up to the limit."""

    def __init__(self, most: int = OPERATIONS_MAX) -> None:
        self._most = most
        self._known: set[str] = set()
        self._adding = threading.Lock()

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._known)

    def label(self, operation: str) -> str:
        if operation in self._known:
            return operation
        with self._adding:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(operation)
            return operation
