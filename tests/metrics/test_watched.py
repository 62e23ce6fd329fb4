"""A watched store that answers is up, whatever its driver; and what cannot be asked at a scrape is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine, inspect
from sqlalchemy.ext.asyncio import create_async_engine

from onefold import Guard, UsageError
from onefold.metrics import prometheus, watched
from onefold.metrics.table import STORE_UP
from onefold.metrics.watched import Watched
from onefold.stores import schema
from services.processes import wait_until
from services.redis import named_client
from services.servers import Server
from tests.support import PATIENCE


@pytest.mark.parametrize(
    ("server", "driver"),
    [("postgres_url", "postgresql+asyncpg"), ("mysql_url", "mysql+asyncmy"), ("postgres_url", "postgresql")],
)
def test_a_healthy_store_is_up_whatever_its_driver(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: str, driver: str
) -> None:
    url = driver + request.getfixturevalue(server)[request.getfixturevalue(server).index(":") :]
    schema.apply(request.getfixturevalue(server))
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    monkeypatch.setattr(watched, "FRESH_SECONDS", 0.0)
    registry = CollectorRegistry()
    uninstall = prometheus.install(registry=registry, stores={"money": url})

    # More than one scrape, each in an event loop of its own.
    seen = [registry.get_sample_value("onefold_store_up", {"store": "money"}) for _ in range(3)]
    lag = registry.get_sample_value("onefold_purge_lag_seconds", {"store": "money"})
    uninstall()

    assert seen == [1.0, 1.0, 1.0]
    assert lag == 0.0


def test_a_store_is_up_as_soon_as_its_tables_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/onefold.db"
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    monkeypatch.setattr(watched, "FRESH_SECONDS", 0.0)
    stores = Watched({"money": url})

    before = [reading.value for reading in stores.readings(STORE_UP)]
    with Guard(url) as guard:
        guard.run("charge", "pay_1", lambda: 1)
    after = [reading.value for reading in stores.readings(STORE_UP)]

    assert (before, after) == ([0.0], [1.0])


def test_an_engine_of_yours_is_asked_and_nothing_is_created_in_its_database(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    monkeypatch.setattr(watched, "FRESH_SECONDS", 0.0)
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    stores = Watched({"money": engine})

    before = [reading.value for reading in stores.readings(STORE_UP)]
    created = inspect(engine).get_table_names()
    with Guard(engine) as guard:
        guard.run("charge", "pay_1", lambda: 1)
    after = [reading.value for reading in stores.readings(STORE_UP)]
    engine.dispose()

    assert (before, created, after) == ([0.0], [], [1.0])


def test_an_async_engine_is_refused_when_it_is_given() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")

    with pytest.raises(UsageError, match=r"A scrape cannot await: pass the URL"):
        Watched({"money": engine})


def test_who_uninstalls_leaves_no_connection_behind(own_redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    registry = CollectorRegistry()
    with named_client(own_redis.url) as client:
        before = len(client.client_list())
        uninstall = prometheus.install(registry=registry, stores={"money": own_redis.url})
        assert registry.get_sample_value("onefold_store_up", {"store": "money"}) == 1
        during = len(client.client_list())

        uninstall()

        assert during > before
        # The server notices a moment later.
        wait_until(lambda: len(client.client_list()) == before, "nobody else is connected", PATIENCE)
