"""Export metrics to OpenTelemetry: `onefold.metrics.opentelemetry.install()`, once per process.

The same metrics as for Prometheus, under OpenTelemetry's names, and attributes on the span that is current when
something happens to a delivery. It uses only the API: without an SDK it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from onefold import Event, UsageError, __version__, subscribe
from onefold.events import Kind, Sent, subscribe_to_sends
from onefold.metrics import timing as timings
from onefold.metrics.sends import CountedSends
from onefold.metrics.table import BUCKETS, METRICS, STORE_SECONDS, Metric, Operations, counted, outcome
from onefold.metrics.watched import QUESTIONS, Watched

try:
    from opentelemetry import trace
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter
except ImportError as missing:
    raise UsageError("the OpenTelemetry API is not installed: pip install 'onefold[opentelemetry]'") from missing

# Events that are worth showing in a trace next to the outcome.
NOTED: Final = {
    Kind.TAKEN_OVER,
    Kind.BYPASSED,
    Kind.WAITED,
    Kind.HELD,
    Kind.LOST,
    Kind.NOT_RECORDED,
    Kind.UNPROTECTED,
    Kind.STORE_FAILED,
    Kind.BURIED,
}


def install(
    *, stores: Mapping[str, Any] | None = None, provider: MeterProvider | None = None, spans: bool = True
) -> Callable[[], None]:
    """Report the work of all guards in this process to the meter provider and the current span.

    `stores` are queried when metrics are collected: a name for the attribute, and a URL or a sync store. Call the
    returned function to stop; instruments that query stores stay, because OpenTelemetry cannot remove them.
    """
    meter = get_meter("onefold", __version__, provider)
    listener = OpenTelemetryListener(meter, spans=spans)
    ends = [subscribe(listener), timings.subscribe(listener.time), subscribe_to_sends(listener.send)]
    if stores:
        watched = Watched(stores)
        _observe(meter, watched)
        ends.append(watched.close)

    def uninstall() -> None:
        for end in ends:
            end()

    return uninstall


class OpenTelemetryListener:
    """Counts events on a meter, and writes attributes on the current span."""

    def __init__(self, meter: Meter | None = None, *, spans: bool = True) -> None:
        meter = get_meter("onefold", __version__) if meter is None else meter
        self._spans = spans
        self._operations = Operations()
        self._sends = CountedSends()
        self._counters = {
            metric: meter.create_counter(metric.dotted, metric.unit, metric.help)
            for metric in METRICS
            if metric.kind == "counter" and metric not in QUESTIONS
        }
        self._seconds = meter.create_histogram(
            STORE_SECONDS.dotted, STORE_SECONDS.unit, STORE_SECONDS.help, explicit_bucket_boundaries_advisory=BUCKETS
        )

    def __call__(self, event: Event) -> None:
        self._increase(counted(event, self._operations.label(event.operation)))
        if self._spans:
            describe(event)

    def send(self, sent: Sent) -> None:
        """Count a message that is sent."""
        self._increase(self._sends.counted(sent))

    def _increase(self, counters: Iterable[tuple[Metric, tuple[str, ...]]]) -> None:
        for metric, labels in counters:
            self._counters[metric].add(1, dict(zip(metric.labels, labels, strict=True)))

    def time(self, timing: timings.Timing) -> None:
        """Record one timing of a measured store."""
        labels = {"store": timing.store, "call": timing.call, "result": "failed" if timing.failed else "ok"}
        self._seconds.record(timing.seconds, labels)


def describe(event: Event) -> None:
    """Describe an event on the current span, with the key's digest: that is not a label, and traces need it."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    ended = outcome(event)
    if ended is not None:
        span.set_attributes(
            {
                "onefold.operation": event.operation,
                "onefold.key_digest": event.digest,
                "onefold.outcome": ended,
                "onefold.attempt": event.attempt,
            }
        )
    if event.kind in NOTED:
        # A message may be buried because it has no key: then there is no digest.
        key = {"onefold.key_digest": event.digest} if event.address.key else {}
        span.add_event(f"onefold.{event.kind}", {**key, "onefold.attempt": event.attempt})


def _observe(meter: Meter, watched: Watched) -> None:
    """Create the instruments that query the stores, one query each."""
    for metric in QUESTIONS:
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(metric.dotted, [_callback(metric, watched)], metric.unit, metric.help)


def _callback(metric: Metric, watched: Watched) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observed(_options: CallbackOptions) -> list[Observation]:
        return [
            Observation(one.value, dict(zip(metric.labels, one.labels, strict=True)))
            for one in watched.readings(metric)
        ]

    return observed
