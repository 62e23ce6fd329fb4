"""What a producer sends, and how many keys that is: exact for retries, in bounded memory."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry

from onefold.events import Sent, subscribe_to_sends, tell_sent
from onefold.metrics import opentelemetry, prometheus
from onefold.metrics.sends import CountedSends, RecentKeys
from onefold.metrics.table import OPERATIONS_MAX, OTHER


@pytest.fixture
def told() -> Iterator[list[Sent]]:
    found: list[Sent] = []
    end = subscribe_to_sends(found.append)
    yield found
    end()


def counts(sends: CountedSends, *keys: str, hop: str = "charges") -> Counter[tuple[str, ...]]:
    return Counter((metric.name, *labels) for key in keys for metric, labels in sends.counted(Sent(hop, key)))


def test_a_send_that_repeats_its_key_is_no_other_key() -> None:
    found = counts(CountedSends(), "a", "b", "b", "c", "a")

    assert found == {("onefold_sends_total", "charges"): 5, ("onefold_sent_keys_total", "charges"): 3}


def test_one_key_on_two_hops_is_a_key_of_each() -> None:
    sends = CountedSends()

    assert counts(sends, "a", hop="charges")["onefold_sent_keys_total", "charges"] == 1
    assert counts(sends, "a", hop="mails")["onefold_sent_keys_total", "mails"] == 1


def test_the_last_keys_are_remembered_and_not_all_of_them() -> None:
    keys, least = RecentKeys(least=100), 100
    for number in range(10_000):
        assert keys.is_new(Sent("charges", str(number)))
        assert len(keys) <= 2 * least

    assert not any(keys.is_new(Sent("charges", str(number))) for number in range(10_000 - least, 10_000))
    assert keys.is_new(Sent("charges", "0"))


def test_a_key_that_is_sent_again_and_again_stays_known() -> None:
    keys = RecentKeys(least=10)
    keys.is_new(Sent("charges", "again"))

    for number in range(1_000):
        keys.is_new(Sent("charges", str(number)))
        assert number % 5 or not keys.is_new(Sent("charges", "again"))


def test_threads_that_send_the_same_keys_count_each_once() -> None:
    keys, new = RecentKeys(), Counter[str]()

    def send() -> None:
        for number in range(2_000):
            if keys.is_new(Sent("charges", str(number))):
                new[str(number)] += 1

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(new) == 2_000
    assert set(new.values()) == {1}


def test_hops_beyond_the_limit_are_one_series() -> None:
    sends = CountedSends()
    labels = {
        label
        for number in range(OPERATIONS_MAX + 50)
        for _, found in sends.counted(Sent(f"queue-{number}", "k"))
        for label in found
    }

    assert len(labels) == OPERATIONS_MAX + 1
    assert OTHER in labels


def test_prometheus_shows_them_until_it_is_uninstalled() -> None:
    registry = CollectorRegistry()
    uninstall = prometheus.install(registry=registry)
    for key in ("pay_1", "pay_2", "pay_2"):
        tell_sent("charges", key)

    assert registry.get_sample_value("onefold_sends_total", {"hop": "charges"}) == 3
    assert registry.get_sample_value("onefold_sent_keys_total", {"hop": "charges"}) == 2
    uninstall()
    tell_sent("charges", "pay_4")
    assert registry.get_sample_value("onefold_sends_total", {"hop": "charges"}) is None


def test_opentelemetry_shows_them_under_its_names() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    uninstall = opentelemetry.install(provider=provider)
    for key in ("pay_1", "pay_2", "pay_2"):
        tell_sent("charges", key)
    uninstall()
    tell_sent("charges", "pay_4")

    data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: [
            (dict(point.attributes or {}), getattr(point, "value", None)) for point in metric.data.data_points
        ]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    provider.shutdown()
    assert found["onefold.sends"] == [({"hop": "charges"}, 3)]
    assert found["onefold.sent_keys"] == [({"hop": "charges"}, 2)]


def test_a_listener_that_fails_keeps_nothing_from_being_sent(
    told: list[Sent], caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: Sent) -> None:
        raise RuntimeError("no disk")

    end = subscribe_to_sends(failing)
    with caplog.at_level(logging.ERROR, "onefold"):
        tell_sent("charges", "secret-key")
    end()

    assert told == [Sent("charges", "secret-key")]
    (said,) = caplog.records
    assert "a listener failed on a message to charges" in said.message
    assert "secret-key" not in said.message
