"""Export metrics to Prometheus: `onefold.metrics.prometheus.install()`, once per process.

A subscriber of events and timings, and a collector that queries stores at each scrape. Names and labels are those of
`metrics.table`. Counting an event takes a microsecond or two, and never waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onefold import Event, UsageError, subscribe
from onefold.events import Sent, subscribe_to_sends
from onefold.metrics import timing as timings
from onefold.metrics.sends import CountedSends
from onefold.metrics.table import BUCKETS, METRICS, STORE_SECONDS, Metric, Operations, counted
from onefold.metrics.watched import QUESTIONS, Watched

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise UsageError("the Prometheus client library is not installed: pip install 'onefold[prometheus]'") from missing

Family = GaugeMetricFamily | CounterMetricFamily


def install(*, stores: Mapping[str, Any] | None = None, registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Count every event of every guard of this process; call the returned function to undo it.

    `stores` are queried at each scrape: a name for the label, and a URL or a sync store.
    """
    # Whatever may refuse comes first: a half-filled registry could not be filled again.
    watching = StoreCollector(stores) if stores else None
    listener = PrometheusListener(registry)
    if watching is not None:
        registry.register(watching)
    ends = [subscribe(listener), timings.subscribe(listener.time), subscribe_to_sends(listener.send)]

    ends.append(listener.unregister)
    if watching is not None:
        ends += [lambda: registry.unregister(watching), watching.close]

    def uninstall() -> None:
        # A second call finds nothing left to end.
        while ends:
            ends.pop(0)()

    return uninstall


class PrometheusListener:
    """Counts events: `Guard(..., on_event=PrometheusListener())`, or `install()` for all guards."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._operations = Operations()
        self._sends = CountedSends()
        try:
            self._counters = {metric: _counter(metric, registry) for metric in METRICS if _is_counted(metric)}
        except ValueError as error:
            raise UsageError(
                "this registry already has Onefold's metrics: call install() once per process, or pass one "
                "PrometheusListener to several guards"
            ) from error
        self._seconds = Histogram(
            STORE_SECONDS.name, STORE_SECONDS.help, STORE_SECONDS.labels, buckets=BUCKETS, registry=registry
        )
        self._begun: set[str] = set()
        # Children by their labels: looking one up in the library takes longer than counting.
        self._children: dict[tuple[Metric, tuple[str, ...]], Counter] = {}

    def __call__(self, event: Event) -> None:
        operation = self._operations.label(event.operation)
        if operation not in self._begun:
            self._begin(operation)
        self._increase(counted(event, operation))

    def send(self, sent: Sent) -> None:
        """Count a message that is sent."""
        self._increase(self._sends.counted(sent))

    def _increase(self, counters: Iterable[tuple[Metric, tuple[str, ...]]]) -> None:
        for metric, labels in counters:
            child = self._children.get((metric, labels))
            if child is None:
                child = self._children[metric, labels] = self._counters[metric].labels(*labels)
            child.inc()

    def _begin(self, operation: str) -> None:
        """Start every counter of an operation at zero: a series that began at one would show no increase."""
        self._begun.add(operation)
        for metric, counter in self._counters.items():
            if metric.labels == ("operation",):
                counter.labels(operation)

    def time(self, timing: timings.Timing) -> None:
        """Record one timing of a measured store."""
        result = "failed" if timing.failed else "ok"
        self._seconds.labels(timing.store, timing.call, result).observe(timing.seconds)

    def unregister(self) -> None:
        for collector in (*self._counters.values(), self._seconds):
            self._registry.unregister(collector)


class StoreCollector(Collector):
    """Queries stores at each scrape: whether they answer, and what they report about their records."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        self._watched = Watched(stores)

    def describe(self) -> Iterable[Family]:
        # So that registering it queries no store.
        return [_family(metric) for metric in QUESTIONS]

    def collect(self) -> Iterable[Family]:
        for metric in QUESTIONS:
            family = _family(metric)
            for reading in self._watched.readings(metric):
                family.add_metric(reading.labels, reading.value)
            yield family

    def close(self) -> None:
        """Close the stores that scrapes have opened."""
        self._watched.close()


def _is_counted(metric: Metric) -> bool:
    return metric.kind == "counter" and metric not in QUESTIONS


def _counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def _family(metric: Metric) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)
