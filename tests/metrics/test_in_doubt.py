"""Held and abandoned records are counted at each scrape, while they wait: by an index, and up to a bound."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine

from onefold import Done, Guard, OutcomeUnknown, Policy
from onefold._model import Entry
from onefold.keys import address
from onefold.metrics import opentelemetry, prometheus, watched
from onefold.metrics.table import ABANDONED_RECORDS, HELD_RECORDS, OPERATIONS_MAX
from onefold.metrics.watched import Watched
from onefold.stores.base import Untold
from onefold.stores.mysql import facts as mysql_facts
from onefold.stores.postgres import facts as postgres_facts
from onefold.stores.sql.facts import IN_DOUBT_COUNTED_MAX
from onefold.stores.sqlite import facts as sqlite_facts
from tests.support import PATIENCE

HOLD = Policy(after_crash="hold", keep="forever")

KINDS = ["postgres", "mysql", "sqlite"]


@pytest.fixture(autouse=True)
def at_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PATIENCE", PATIENCE)
    monkeypatch.setattr(watched, "FRESH_SECONDS", 0.0)


def url_of(kind: str, request: pytest.FixtureRequest) -> str:
    if kind == "sqlite":
        return f"sqlite:///{request.getfixturevalue('tmp_path')}/onefold.db"
    url: str = request.getfixturevalue(f"{kind}_url")
    return url


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request.param, request)


def hold(guard: Guard, operation: str, *keys: str) -> None:
    def fails() -> None:
        raise OutcomeUnknown("no answer")

    for key in keys:
        with pytest.raises(OutcomeUnknown):
            guard.run(operation, key, fails)


def abandon(guard: Guard, operation: str, key: str, ttl: float = math.inf, **fields: Any) -> None:
    """A worker has claimed it, its lease is over, and nobody came since."""
    entry = Entry(address=address(operation, key), token=os.urandom(16), lease=0.0, ttl=ttl, **fields)
    assert guard.store.claim(entry) is None


def counts(stores: Watched) -> tuple[dict[str, float], dict[str, float]]:
    held, abandoned = (
        {one.labels[1]: one.value for one in stores.readings(metric)} for metric in (HELD_RECORDS, ABANDONED_RECORDS)
    )
    return held, abandoned


@contextmanager
def watching(url: Any) -> Iterator[Watched]:
    stores = Watched({"money": url})
    try:
        yield stores
    finally:
        stores.close()


def test_what_waits_is_counted_by_operation_until_it_is_resolved(url: str) -> None:
    with Guard(url, policy=HOLD) as guard, watching(url) as stores:
        guard.run("charge", "done", lambda: 1)
        hold(guard, "charge", "pay_1", "pay_2")
        hold(guard, "refund", "pay_1")
        abandon(guard, "charge", "pay_3")
        waiting = counts(stores)
        for operation, key in (("charge", "pay_1"), ("charge", "pay_2"), ("charge", "pay_3"), ("refund", "pay_1")):
            guard.resolve(operation, key, Done(), by="ada", reason="asked the bank")
        resolved = counts(stores)

    assert waiting == ({"charge": 2.0, "refund": 1.0}, {"charge": 1.0, "refund": 0.0})
    # Not gone: an alert that compares would not know whether anybody still counts.
    assert resolved == ({"charge": 0.0, "refund": 0.0}, {"charge": 0.0, "refund": 0.0})


def test_what_runs_and_what_is_finished_does_not_wait(url: str) -> None:
    with Guard(url, policy=HOLD) as guard, watching(url) as stores:
        during = guard.run("charge", "pay_1", lambda: sum(counts(stores)[1].values())).value
        after = counts(stores)

    assert during == 0.0
    assert after == ({"charge": 0.0}, {"charge": 0.0})


def test_a_run_that_expires_by_itself_is_not_counted_and_neither_is_a_bypass(url: str) -> None:
    with Guard(url) as guard, watching(url) as stores:
        abandon(guard, "charge", "pay_1", ttl=86_400.0)
        abandon(guard, "charge", "pay_2", bypasses=1)

        assert sum(counts(stores)[1].values()) == 0.0


def test_the_record_of_a_run_that_does_not_expire_is_read_as_such(url: str) -> None:
    with Guard(url, policy=HOLD) as guard:
        abandon(guard, "charge", "pay_1")
        hold(guard, "charge", "pay_2")
        found = [guard.read("charge", key) for key in ("pay_1", "pay_2")]

    assert [record.ttl_left for record in found if record is not None] == [math.inf, math.inf]


def test_both_exporters_have_it(url: str) -> None:
    reader, registry = InMemoryMetricReader(), CollectorRegistry()
    ends = [
        prometheus.install(registry=registry, stores={"money": url}),
        opentelemetry.install(provider=MeterProvider([reader]), stores={"money": url}),
    ]
    with Guard(url, policy=HOLD) as guard:
        hold(guard, "charge", "pay_1")
        labels = {"store": "money", "operation": "charge"}

        assert registry.get_sample_value("onefold_held_records", labels) == 1.0
        assert registry.get_sample_value("onefold_abandoned_records", labels) == 0.0
        data = reader.get_metrics_data()
        assert data is not None
        points = [
            (dict(point.attributes or {}), point.value)  # type: ignore[union-attr]
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "onefold.held_records"
            for point in metric.data.data_points
        ]
        assert points == [(labels, 1.0)]
    for end in ends:
        end()


@pytest.mark.parametrize(("kind", "driver"), [("postgres", "postgresql+asyncpg"), ("mysql", "mysql+asyncmy")])
def test_an_async_driver_tells_it_too(kind: str, driver: str, request: pytest.FixtureRequest) -> None:
    url = url_of(kind, request)
    with Guard(url, policy=HOLD) as guard:
        hold(guard, "charge", "pay_1")

    with watching(driver + url[url.index(":") :]) as stores:
        assert counts(stores)[0] == {"charge": 1.0}


@pytest.mark.parametrize(
    ("kind", "driver"), [("postgres", "postgresql+psycopg"), ("mysql", "mysql+pymysql"), ("sqlite", "sqlite")]
)
def test_an_engine_of_yours_tells_it_too(kind: str, driver: str, request: pytest.FixtureRequest) -> None:
    url = url_of(kind, request)
    engine = create_engine(driver + url[url.index(":") :])
    with Guard(engine, policy=HOLD) as guard, watching(engine) as stores:
        hold(guard, "charge", "pay_1")
        abandon(guard, "charge", "pay_2")

        assert counts(stores) == ({"charge": 1.0}, {"charge": 1.0})
    engine.dispose()


@pytest.mark.parametrize("kind", ["redis_url", "dynamodb_url", "memory"])
def test_a_store_that_would_have_to_read_everything_has_no_series(kind: str, request: pytest.FixtureRequest) -> None:
    url = "memory:" if kind == "memory" else request.getfixturevalue(kind)
    with Guard(url, policy=HOLD) as guard:
        hold(guard, "charge", "pay_1")

        with watching(url) as stores:
            assert counts(stores) == ({}, {})


def test_without_its_index_nothing_is_counted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/onefold.db"
    with Guard(url, policy=HOLD) as guard:
        hold(guard, "charge", "pay_1")
    with closing(sqlite3.connect(tmp_path / "onefold.db")) as connection:
        connection.execute("DROP INDEX onefold_records_expires")

    with watching(url) as stores, Guard(url) as guard:
        assert isinstance(guard.store.facts()["in_doubt"], Untold)
        assert counts(stores) == ({}, {})


def test_operations_beyond_the_limit_are_one_series(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/onefold.db"
    with Guard(url, policy=HOLD) as guard, watching(url) as stores:
        for number in range(OPERATIONS_MAX + 5):
            hold(guard, f"charge-{number:03}", "pay_1")
        held, _ = counts(stores)

    assert (len(held), held["other"], sum(held.values())) == (OPERATIONS_MAX + 1, 5.0, OPERATIONS_MAX + 5)


# Thousands that are finished and kept forever, and more in doubt than are counted.
FILL = {
    "postgres": (
        "INSERT INTO onefold_records (began, changed, expires, due, held, attempt, revision, scope, operation, key, "
        "state, token, remark) SELECT began, changed, expires, due, held, attempt, revision, scope, operation, "
        "key || number, state, token, remark FROM onefold_records, generate_series(1, 11000) AS number"
    ),
    "mysql": (
        "INSERT INTO onefold_records SELECT scope, operation, CONCAT(`key`, seq), state, attempt, began, changed, "
        "lease_until, expires, bypasses, remark, revision, token, fingerprint, notes, omitted, result "
        "FROM onefold_records, seq_1_to_11000"
    ),
    "sqlite": (
        "WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 11000) "
        "INSERT INTO onefold_records SELECT scope, operation, key || number, state, attempt, began, changed, "
        "lease_until, expires, bypasses, remark, revision, token, fingerprint, notes, omitted, result "
        "FROM onefold_records, numbers"
    ),
}
EXPLAINED = {
    "postgres": (f"EXPLAIN {postgres_facts._IN_DOUBT}", postgres_facts.PURGE_INDEX, "ANALYZE onefold_records"),
    "mysql": (f"EXPLAIN {mysql_facts._IN_DOUBT}", mysql_facts.PURGE_INDEX, "ANALYZE TABLE onefold_records"),
    "sqlite": (f"EXPLAIN QUERY PLAN {sqlite_facts._IN_DOUBT}", sqlite_facts.PURGE_INDEX, "ANALYZE onefold_records"),
}


def executing(kind: str, url: str) -> Any:
    if kind == "postgres":
        return psycopg.connect(url, autocommit=True)
    if kind == "sqlite":
        return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    server, _, database = url.partition("://")[2].rpartition("/")
    login, _, place = server.rpartition("@")
    user, _, password = login.partition(":")
    host, _, port = place.partition(":")
    return pymysql.connect(
        host=host, port=int(port), user=user, password=password, database=database.partition("?")[0], autocommit=True
    )


def executed(kind: str, connection: Any, statement: str) -> str:
    cursor = connection.cursor()
    cursor.execute(statement)
    return str(cursor.fetchall()) if kind != "postgres" or cursor.description else ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["done", "held"])
def test_it_is_an_index_that_is_read_and_not_the_table(kind: str, state: str, request: pytest.FixtureRequest) -> None:
    url = url_of(kind, request)
    with Guard(url, policy=HOLD) as guard, watching(url) as stores, closing(executing(kind, url)) as connection:
        if state == "done":
            guard.run("charge", "pay_", lambda: 1)
        else:
            hold(guard, "charge", "pay_")
        executed(kind, connection, FILL[kind])
        explain, index, analyze = EXPLAINED[kind]
        executed(kind, connection, analyze)
        plan = executed(kind, connection, explain)
        held, _ = counts(stores)

    assert index in plan, plan
    assert held == ({} if state == "done" else {"charge": IN_DOUBT_COUNTED_MAX})
