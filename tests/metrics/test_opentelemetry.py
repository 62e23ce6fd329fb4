"""OpenTelemetry: the metrics of the table under its own names, and what a span says of the deliveries in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from onefold import Guard, Held, Policy
from onefold.events import Kind, tell
from onefold.metrics import measured, opentelemetry, watched
from onefold.metrics.table import BUCKETS, METRICS
from onefold.stores.base import Address
from tests.metrics.test_prometheus import Behind
from tests.support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a store that answers may take longer than a scrape waits for it."""
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    provider = MeterProvider([reader])
    yield provider
    provider.shutdown()


@pytest.fixture
def _installed(provider: MeterProvider) -> Iterator[None]:
    uninstall = opentelemetry.install(provider=provider, stores={"money": Behind()})
    yield
    uninstall()


class Spans:
    """A tracer of the test's own, and the spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("tests")

    @property
    def last(self) -> ReadableSpan:
        return self.exporter.get_finished_spans()[-1]


def points(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Every metric by its name: its unit, and its points by their attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    found = [metric for one in data.resource_metrics for scope in one.scope_metrics for metric in scope.metrics]
    return {
        metric.name: (
            metric.unit,
            {tuple(sorted((point.attributes or {}).items())): point for point in metric.data.data_points},
        )
        for metric in found
    }


@pytest.mark.usefixtures("_installed")
def test_deliveries_are_counted_under_the_names_of_opentelemetry(reader: InMemoryMetricReader) -> None:
    guard = Guard(measured("memory:", name="money"))
    guard.run("charge", "pay_1", lambda: 1)
    guard.run("charge", "pay_1", lambda: 1)

    found = points(reader)

    assert found["onefold.deliveries"][1][("operation", "charge"), ("outcome", "done")].value == 1
    assert found["onefold.duplicates"][1][(("operation", "charge"),)].value == 1
    unit, calls = found["onefold.store"]
    assert unit == "s"
    claims = calls[("call", "claim"), ("result", "ok"), ("store", "money")]
    assert claims.count == 2
    assert tuple(claims.explicit_bounds) == BUCKETS


@pytest.mark.usefixtures("_installed")
def test_stores_are_asked_when_metrics_are_collected(reader: InMemoryMetricReader) -> None:
    found = points(reader)

    assert found["onefold.purge_lag"][1][(("store", "money"),)].value == 90.0
    assert found["onefold.evicted_keys"][1][(("store", "money"),)].value == 7.0
    assert found["onefold.store_up"][1][(("store", "money"),)].value == 1.0


@pytest.mark.usefixtures("_installed")
def test_every_name_is_one_of_the_table(reader: InMemoryMetricReader) -> None:
    Guard(measured("memory:")).run("charge", "pay_1", lambda: 1)

    assert set(points(reader)) <= {metric.dotted for metric in METRICS}


@pytest.mark.usefixtures("_installed")
def test_the_current_span_says_what_became_of_its_delivery() -> None:
    spans, guard = Spans(), Guard("memory:")

    with spans.tracer.start_as_current_span("consume"):
        guard.run("charge", "pay_1", lambda: 1)
    first = dict(spans.last.attributes or {})
    with spans.tracer.start_as_current_span("consume"):
        guard.run("charge", "pay_1", lambda: 1)

    record = guard.read("charge", "pay_1")
    assert record is not None
    assert first == {
        "onefold.operation": "charge",
        "onefold.key_digest": record.address.digest,
        "onefold.outcome": "done",
        "onefold.attempt": 1,
    }
    assert (spans.last.attributes or {})["onefold.outcome"] == "replayed"


@pytest.mark.usefixtures("_installed")
def test_what_a_person_wants_to_see_is_an_event_of_the_span() -> None:
    spans, guard = Spans(), Guard("memory:", policy=Policy(after_crash="hold"))

    def times_out() -> None:
        raise TimeoutError

    with spans.tracer.start_as_current_span("consume"):
        with pytest.raises(TimeoutError):
            guard.run("charge", "pay_1", times_out)
        with pytest.raises(Held):
            guard.run("charge", "pay_1", times_out)

    assert [event.name for event in spans.last.events] == ["onefold.held"]
    assert (spans.last.attributes or {})["onefold.outcome"] == "still_held"


@pytest.mark.usefixtures("_installed")
def test_no_key_and_no_scope_is_in_a_span() -> None:
    spans = Spans()

    with spans.tracer.start_as_current_span("consume"):
        Guard("memory:", scope="tenant-4711").run("charge", "sk_live_4242", lambda: 1)

    written = spans.last.to_json()
    assert "onefold.key_digest" in written
    assert "sk_live_4242" not in written
    assert "tenant-4711" not in written


@pytest.mark.usefixtures("_installed")
def test_a_message_that_is_buried_is_an_event_and_no_outcome(reader: InMemoryMetricReader) -> None:
    spans, keyed = Spans(), Address("", "charge", "pay_1")

    with spans.tracer.start_as_current_span("consume"):
        tell(Kind.BURIED, keyed)
        tell(Kind.BURIED, Address("", "charge", ""))

    assert [(one.name, (one.attributes or {}).get("onefold.key_digest")) for one in spans.last.events] == [
        ("onefold.buried", keyed.digest),
        ("onefold.buried", None),
    ]
    assert not spans.last.attributes
    assert points(reader)["onefold.buried"][1][(("operation", "charge"),)].value == 2


def test_to_end_it_twice_does_nothing(provider: MeterProvider) -> None:
    uninstall = opentelemetry.install(provider=provider)

    uninstall()
    uninstall()


def test_without_spans_nothing_is_written_on_them(provider: MeterProvider) -> None:
    uninstall, spans = opentelemetry.install(provider=provider, spans=False), Spans()

    with spans.tracer.start_as_current_span("consume"):
        Guard("memory:").run("charge", "pay_1", lambda: 1)
    uninstall()

    assert not spans.last.attributes


def test_without_an_sdk_it_does_nothing_and_costs_no_error() -> None:
    code = (
        "from onefold import Guard; from onefold.metrics import opentelemetry; end = opentelemetry.install();"
        "print(Guard('memory:').run('charge', 'pay_1', lambda: 1).value); end();"
        "import sys; print('opentelemetry.sdk' in sys.modules)"
    )

    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout

    assert said.split() == ["1", "False"]


def test_a_missing_package_is_one_line_that_says_what_to_install() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import onefold.metrics.opentelemetry"

    said = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True).stderr

    assert "pip install 'onefold[opentelemetry]'" in said.splitlines()[-1]
