"""Prometheus: one line installs it, every guard is counted, stores are asked at a scrape, and it can be ended."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from onefold import Guard, KeyReused, Policy, Record, UsageError
from onefold.events import Kind, tell
from onefold.metrics import measured, prometheus, watched
from onefold.metrics.table import METRICS
from onefold.metrics.watched import evicted_keys, purge_lag
from onefold.stores.base import Address, Untold
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import PATIENCE, ProxyStore, eventually


class Behind(MemoryStore):
    """A store that says that its purge is behind, and that its servers have evicted keys."""

    def facts(self) -> dict[str, object]:
        return {
            "kind": "both",
            "expired_for": 90.0,
            "evicted_keys": 7,
        }


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a store that answers may take longer than a scrape waits for it."""
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def installed(registry: CollectorRegistry) -> Iterator[CollectorRegistry]:
    uninstall = prometheus.install(registry=registry, stores={"money": Behind()})
    yield registry
    uninstall()


def test_one_line_counts_every_guard_of_the_process(installed: CollectorRegistry) -> None:
    for guard in (Guard("memory:"), Guard("memory:")):
        guard.run("charge", "pay_1", lambda: 1)
        guard.run("charge", "pay_1", lambda: 1)

    assert sample(installed, "onefold_deliveries_total", operation="charge", outcome="done") == 2
    assert sample(installed, "onefold_deliveries_total", operation="charge", outcome="replayed") == 2
    assert sample(installed, "onefold_duplicates_total", operation="charge") == 2
    assert sample(installed, "onefold_starts_total", operation="charge") == 2


def test_the_first_of_something_rare_is_a_rise_from_zero(installed: CollectorRegistry) -> None:
    Guard("memory:").run("charge", "pay_1", lambda: 1)

    assert sample(installed, "onefold_not_recorded_total", operation="charge") == 0
    assert sample(installed, "onefold_held_total", operation="charge") == 0


def test_a_conflict_is_counted(installed: CollectorRegistry) -> None:
    guard = Guard("memory:")
    guard.run("charge", "pay_1", lambda: 1, payload=1)

    with pytest.raises(KeyReused):
        guard.run("charge", "pay_1", lambda: 1, payload=2)

    assert sample(installed, "onefold_conflicts_total", operation="charge") == 1


def test_the_calls_of_a_measured_store_make_a_histogram(installed: CollectorRegistry) -> None:
    Guard(measured("memory:", name="money")).run("charge", "pay_1", lambda: 1)

    assert sample(installed, "onefold_store_seconds_count", store="money", call="claim", result="ok") == 1
    assert sample(installed, "onefold_store_seconds_bucket", store="money", call="claim", result="ok", le="5.0") == 1


def test_stores_are_asked_at_each_scrape(installed: CollectorRegistry) -> None:
    assert sample(installed, "onefold_purge_lag_seconds", store="money") == 90.0
    assert sample(installed, "onefold_evicted_keys_total", store="money") == 7.0
    assert sample(installed, "onefold_store_up", store="money") == 1.0


def test_a_store_that_does_not_answer_is_down_and_the_others_are_asked(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ProxyStore(MemoryStore())
    broken.die()
    uninstall = prometheus.install(registry=registry, stores={"broken": broken, "whole": "memory:"})

    up = {name: sample(registry, "onefold_store_up", store=name) for name in ("broken", "whole")}
    uninstall()

    assert up == {"broken": 0.0, "whole": 1.0}
    assert "the watched store broken did not answer" in caplog.text


class Hangs(MemoryStore):
    """It never answers, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.asked = 0

    def read(self, address: Address) -> Record | None:
        self.asked += 1
        self.let_go.wait(PATIENCE)
        return super().read(address)


def test_a_store_that_hangs_is_down_and_holds_no_scrape_up(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "PATIENCE", 0.05)
    monkeypatch.setattr(watched, "FRESH_SECONDS", 0.0)
    hanging = Hangs()
    uninstall = prometheus.install(registry=registry, stores={"hangs": hanging, "whole": "memory:"})

    before = sample(registry, "onefold_store_up", store="hangs")
    # It may take more than one scrape to be quick enough.
    whole = eventually(lambda: sample(registry, "onefold_store_up", store="whole") == 1.0)
    after = sample(registry, "onefold_store_up", store="hangs")
    asked = hanging.asked
    hanging.let_go.set()
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    again = sample(registry, "onefold_store_up", store="hangs")
    uninstall()

    assert (before, whole, after) == (0.0, True, 0.0)
    assert asked == 1, "threads pile up behind a store that hangs"
    assert again == 1.0


def test_a_store_that_cannot_say_has_no_gauge(registry: CollectorRegistry) -> None:
    uninstall = prometheus.install(registry=registry, stores={"plain": ProxyStore(MemoryStore())})

    assert sample(registry, "onefold_purge_lag_seconds", store="plain") is None
    assert sample(registry, "onefold_evicted_keys_total", store="plain") is None
    uninstall()


def test_a_store_that_has_to_be_async_is_refused_at_once(registry: CollectorRegistry) -> None:
    with pytest.raises(UsageError, match="a scrape cannot await"):
        prometheus.install(registry=registry, stores={"money": AsyncMemoryStore()})

    prometheus.install(registry=registry, stores={"money": "memory:"})()


def test_a_registry_that_counts_already_is_refused_in_a_line(installed: CollectorRegistry) -> None:
    with pytest.raises(UsageError, match="once per process"):
        prometheus.install(registry=installed)


def test_it_ends_as_if_it_had_never_been_there(registry: CollectorRegistry) -> None:
    prometheus.install(registry=registry, stores={"money": "memory:"})()
    Guard("memory:").run("charge", "pay_1", lambda: 1)

    assert generate_latest(registry) == b""
    prometheus.install(registry=registry)()


def test_to_end_it_twice_does_nothing(registry: CollectorRegistry) -> None:
    uninstall = prometheus.install(registry=registry, stores={"money": "memory:"})
    uninstall()

    uninstall()

    # Nor does it take back what was installed since.
    end = prometheus.install(registry=registry)
    uninstall()
    Guard("memory:").run("charge", "pay_1", lambda: 1)
    assert sample(registry, "onefold_starts_total", operation="charge") == 1
    end()


def test_messages_that_are_buried_are_counted_with_and_without_a_key(installed: CollectorRegistry) -> None:
    Guard("memory:").run("charge", "pay_1", lambda: 1)
    before = sample(installed, "onefold_buried_total", operation="charge")

    tell(Kind.BURIED, Address("", "charge", "pay_2"), detail="it failed 5 times")
    tell(Kind.BURIED, Address("", "charge", ""), detail="there is no key")

    assert before == 0
    assert sample(installed, "onefold_buried_total", operation="charge") == 2


def test_one_guard_alone_can_be_counted(registry: CollectorRegistry) -> None:
    heard = Guard("memory:", on_event=prometheus.PrometheusListener(registry))

    heard.run("charge", "pay_1", lambda: 1)
    Guard("memory:").run("charge", "pay_1", lambda: 1)

    assert sample(registry, "onefold_deliveries_total", operation="charge", outcome="done") == 1


def test_what_is_scraped_is_what_the_table_says(installed: CollectorRegistry) -> None:
    Guard(measured("memory:", name="money")).run("charge", "pay_1", lambda: 1)

    families = list(text_string_to_metric_families(generate_latest(installed).decode()))

    expected = {(one.name.removesuffix("_total"), one.kind, one.help) for one in METRICS}
    assert {
        (one.name, one.type, one.documentation) for one in families if not one.name.endswith("_created")
    } == expected


def test_no_key_scope_or_digest_is_scraped(installed: CollectorRegistry) -> None:
    guard = Guard("memory:", scope="tenant-4711")

    guard.run("charge", "sk_live_4242", lambda: 1)

    found = guard.read("charge", "sk_live_4242")
    assert found is not None
    text = generate_latest(installed).decode()
    assert "charge" in text
    assert [word for word in ("sk_live_4242", "tenant-4711", found.address.digest) if word in text] == []


def test_a_store_is_asked_once_a_scrape(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "FRESH_SECONDS", PATIENCE)
    inside = ProxyStore(MemoryStore())
    registry.register(prometheus.StoreCollector({"money": inside}))

    generate_latest(registry)

    assert inside.count("read") == 1


@pytest.mark.parametrize("server", ["sqlite", "postgres", "mysql"])
def test_the_purge_lag_of_a_real_store_is_the_age_of_what_has_expired(
    server: str, registry: CollectorRegistry, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/records.db" if server == "sqlite" else str(request.getfixturevalue(f"{server}_url"))
    with Guard(url, policy=Policy(keep=0.001)) as guard:
        collector = prometheus.StoreCollector({"money": guard.store})
        guard.store.purge(1)
        registry.register(collector)
        nothing = sample(registry, "onefold_purge_lag_seconds", store="money")
        guard.run("charge", "pay_1", lambda: 1)
        waited = soon(lambda: lag_of(guard))

        assert nothing == 0
        assert 0 < waited < 60


def lag_of(guard: Guard) -> float:
    """Asked anew."""
    return purge_lag(guard.store.facts()) or 0.0


def soon(ask: Callable[[], float]) -> float:
    """The first answer above zero."""
    end = time.monotonic() + PATIENCE
    while not (found := ask()) and time.monotonic() < end:
        pass
    return found


def test_the_evicted_keys_of_a_real_redis_are_read(
    own_redis: Any, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    import redis

    with redis.Redis.from_url(own_redis.url) as client:
        collector = prometheus.StoreCollector({"money": own_redis.url})
        registry.register(collector)
        before = sample(registry, "onefold_evicted_keys_total", store="money")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        for _ in range(100):
            with client.pipeline(transaction=False) as hot:
                for _ in range(20):
                    hot.set(secrets.token_hex(8), "x" * 2_000)
                hot.execute()
        collector.close()
        with Guard(own_redis.url) as guard:
            evicted = evicted_keys(guard.store.facts())

    assert before == 0
    assert evicted is not None
    assert evicted > 0
    assert not caplog.records


def test_what_a_server_does_not_say_has_no_value() -> None:
    assert evicted_keys({"evicted_keys": Untold("forbidden")}) is None
    assert purge_lag({"expired_for": Untold("forbidden")}) is None
    assert purge_lag({"expired_for": None}) == 0
    assert purge_lag({}) is None


WORKER = """
import sys
from onefold import Guard
from onefold.metrics import prometheus

prometheus.install()
for number in range(int(sys.argv[1])):
    Guard("memory:").run("charge", number, lambda: 1)
"""

SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from onefold.metrics.prometheus import StoreCollector

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
registry.register(StoreCollector({"money": "memory:"}))
print(generate_latest(registry).decode())
"""


def test_several_processes_are_added_up_in_multiprocess_mode(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    for count in ("2", "3"):
        subprocess.run([sys.executable, "-c", WORKER, count], env=environment, check=True, timeout=60)
    scraped = subprocess.run(
        [sys.executable, "-c", SCRAPE], env=environment, check=True, timeout=60, capture_output=True, text=True
    ).stdout

    assert 'onefold_deliveries_total{operation="charge",outcome="done"} 5.0' in scraped
    assert 'onefold_store_up{store="money"} 1.0' in scraped


def test_a_missing_package_is_one_line_that_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import onefold.metrics.prometheus"

    said = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True).stderr

    assert "pip install 'onefold[prometheus]'" in said.splitlines()[-1]


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)
