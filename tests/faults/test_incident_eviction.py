"""The incident of the seeds: a Redis that others fill forgets that a payment is done, and it is paid twice.

The same hours with `noeviction`: the guard refuses, and nothing is paid twice. The doctor is red before the first
customer is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from onefold import Guard, StoreUnavailable
from onefold.cli.app import app
from onefold.metrics import watched
from onefold.metrics.prometheus import StoreCollector
from services.fixtures import missing_told
from services.programs import program
from services.redis import named_client
from services.servers import Server
from tests.support import PATIENCE, PROJECT

ALERTS = PROJECT / "ops" / "prometheus-alerts.yaml"

PAYMENTS = 50
MEMORY, LESS_MEMORY = "10mb", "9mb"

# Twice the memory, in batches: what nobody has asked for lately has to go.
BATCHES, BATCH, SIZE = 20, 1_000, 1_000


class Payouts:
    """Payments that are paid through a guard, and what was really paid."""

    def __init__(self, url: str) -> None:
        self.guard = Guard(url)
        self.paid: list[str] = []

    def deliver(self, key: str) -> bool:
        """True: it was answered. False: refused, and to be delivered again later."""
        before = len(self.paid)
        try:
            self.guard.run("payout", key, lambda: self.paid.append(key))
        except StoreUnavailable:
            assert len(self.paid) == before, "it was refused, and was paid all the same"
            return False
        return True

    def deliver_all(self) -> list[bool]:
        return [self.deliver(f"payment-{number}") for number in range(PAYMENTS)]

    def paid_twice(self) -> set[str]:
        return {key for key in self.paid if self.paid.count(key) > 1}


def hot_workload(client: Any) -> int:
    """Another team's cache on the same server, read all the time. How many of its writes were refused."""
    refused = 0
    for batch in range(BATCHES):
        pipeline = client.pipeline(transaction=False)
        for number in range(BATCH):
            pipeline.set(f"cache:{batch}:{number}", b"x" * SIZE)
            pipeline.get(f"cache:{batch}:{number // 2}")
        refused += sum(isinstance(answer, Exception) for answer in pipeline.execute(raise_on_error=False))
    return refused


def doctor(url: str) -> tuple[int, dict[str, str]]:
    """The exit status of `onefold doctor`, and the grades of its checks."""
    said = CliRunner().invoke(app, ["doctor", "--store", url, "--format", "json"])
    (document,) = json.loads(said.stdout)
    return said.exit_code, {check["name"]: check["grade"] for check in document["checks"]}


def scraped(url: str) -> float | None:
    """The metric of evicted keys, as a scrape of Prometheus finds it."""
    registry = CollectorRegistry()
    with closing(StoreCollector({"payouts": url})) as collector:
        registry.register(collector)
        return registry.get_sample_value("onefold_evicted_keys_total", {"store": "payouts"})


def evicted(client: Any) -> int:
    return int(client.info("stats")["evicted_keys"])


def alert_is_silent(promtool: str, count: float | None, folder: Path) -> bool:
    """Whether Prometheus, with our rules, has nothing to say about this number of evicted keys."""
    case = {
        "interval": "1m",
        "input_series": [{"series": 'onefold_evicted_keys_total{store="payouts"}', "values": f"{count}+0x10"}],
        "alert_rule_test": [{"eval_time": "5m", "alertname": "OnefoldKeysEvicted", "exp_alerts": []}],
    }
    test = folder / "incident.yaml"
    test.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    ended = subprocess.run([promtool, "test", "rules", test], check=False, timeout=120, capture_output=True, text=True)
    # What it does when the alert fires is to say that this was not expected.
    assert ended.returncode == 0 or 'alertname="OnefoldKeysEvicted"' in ended.stdout + ended.stderr
    return ended.returncode == 0


def run_as(client: Any, policy: str) -> None:
    client.flushall()
    client.config_set("maxmemory", MEMORY)
    client.config_set("maxmemory-policy", policy)
    # The disk is not what this is about.
    client.config_set("appendfsync", "everysec")
    client.config_resetstat()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a store that answers may take longer than a scrape waits for it."""
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)


@pytest.fixture(scope="module")
def promtool() -> str:
    with missing_told():
        return program("promtool")


@pytest.fixture
def payouts(own_redis: Server) -> Iterator[Payouts]:
    payouts = Payouts(own_redis.url)
    yield payouts
    payouts.guard.close()


def test_a_server_that_evicts_pays_twice_and_the_doctor_was_red_before(
    own_redis: Server, payouts: Payouts, promtool: str, tmp_path: Path
) -> None:
    with named_client(own_redis.url) as client:
        run_as(client, "allkeys-lru")
        status, grades = doctor(own_redis.url)
        assert (status, grades["eviction policy"], grades["evicted keys"]) == (1, "red", "green")
        assert alert_is_silent(promtool, scraped(own_redis.url), tmp_path)
        assert all(payouts.deliver_all())
        assert len(payouts.paid) == PAYMENTS

        hot_workload(client)
        assert all(payouts.deliver_all())

        assert payouts.paid_twice() != set(), "nothing was evicted: the incident did not happen"
        # A full server goes on evicting, for whoever connects.
        before, told, after = evicted(client), scraped(own_redis.url), evicted(client)
        assert told is not None
        assert 0 < before <= told <= after
    assert not alert_is_silent(promtool, scraped(own_redis.url), tmp_path)
    status, grades = doctor(own_redis.url)
    assert (status, grades["evicted keys"], grades["neighbours"]) == (1, "red", "yellow")


def test_a_server_that_does_not_evict_refuses_and_nothing_is_paid_twice(own_redis: Server, payouts: Payouts) -> None:
    with named_client(own_redis.url) as client:
        run_as(client, "noeviction")
        status, grades = doctor(own_redis.url)
        assert (status, grades["eviction policy"]) == (0, "green")
        assert all(payouts.deliver_all())

        refused = hot_workload(client)
        payouts.deliver_all()

        assert refused > 0, "the server is not full"
        # And it stays so, though it gives the buffers of idle clients back after some seconds.
        client.config_set("maxmemory", LESS_MEMORY)
        assert scraped(own_redis.url) == evicted(client) == 0
        assert not payouts.deliver("payment-new"), "a new one has no place, and must not run"
        assert payouts.paid_twice() == set()
        assert len(payouts.paid) == PAYMENTS
        status, grades = doctor(own_redis.url)
        assert (status, grades["memory"], grades["trial"]) == (1, "red", "red")

        # The other team moves away, and what was refused is delivered again.
        client.unlink(*client.scan_iter("cache:*", count=10_000))
        assert payouts.deliver("payment-new")
        assert doctor(own_redis.url)[0] == 0
