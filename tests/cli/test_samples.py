"""Large stores: `stats`, `top` and `show` read a bounded part of them, and say so."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold import Guard, Policy, State
from onefold.cli._common import samples
from onefold.cli.app import app
from onefold.cli.commands import top as watching
from onefold.stores.base import Address, Entry, Query
from onefold.stores.memory import MemoryStore
from onefold.stores.sql.dialect import Reply, SqlRequest
from onefold.stores.sqlite.records import Records
from services import postgres as postgres_server
from tests.cli.test_records import Shelf, refused, shelf

__all__ = ["shelf"]

SAMPLED = 200
MANY = 4_000


@pytest.fixture(autouse=True)
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAMPLE_MAX", "UNSETTLED_MAX", "NEWEST_MAX"):
        monkeypatch.setattr(samples, name, SAMPLED)
    monkeypatch.setattr(watching, "SAMPLE_MAX", SAMPLED)
    monkeypatch.setattr(watching, "LOOK_MAX", SAMPLED)


def put_many(store: Any, count: int, operation: str = "charge", *, scope: str = "", ttl: float = float("inf")) -> None:
    addresses = [Address(scope, operation, f"{operation}_{number:06}") for number in range(count)]
    entries = [Entry(address=one, token=os.urandom(16), state=State.DONE, ttl=ttl) for one in addresses]
    for start in range(0, count, 1_000):
        part = entries[start : start + 1_000]
        if hasattr(store, "claim_all"):
            assert store.claim_all(part) == [None] * len(part)
        else:
            assert [store.claim(one) for one in part] == [None] * len(part)


def put_unsettled(store: Any) -> None:
    forever: dict[str, Any] = {"ttl": float("inf")}
    for number, (state, lease) in enumerate([(State.HELD, 0.0), (State.HELD, 0.0), (State.RUNNING, 0.0)]):
        address = Address("", "charge", f"unsettled_{number}")
        assert store.claim(Entry(address=address, token=os.urandom(16), state=state, lease=lease, **forever)) is None
    running = Entry(address=Address("", "mail", "running"), token=os.urandom(16), lease=600.0, **forever)
    assert store.claim(running) is None


class Read:
    """What SQLite was asked."""

    statements = 0
    rows = 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    counted, send = Read(), Records.send

    def counting(self: Records, request: SqlRequest) -> Reply:
        reply = send(self, request)
        counted.statements += 1
        counted.rows += len(reply.rows)
        return reply

    monkeypatch.setattr(Records, "send", counting)
    return counted


def test_stats_of_a_large_store_are_estimated_and_say_so(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    put_many(shelf.store, MANY // 4, "mail")
    put_unsettled(shelf.store)

    (fact,) = shelf.json("stats")
    charge, mail = fact["operations"]

    assert fact["estimated"] is True
    assert fact["records"] == pytest.approx(1.25 * MANY, rel=0.1)
    assert charge["done"] == pytest.approx(MANY, rel=0.1)
    assert mail["done"] == pytest.approx(MANY / 4, rel=0.2)
    # An index finds them: they are counted.
    assert (charge["held"], charge["abandoned"], mail["running"]) == (2, 1, 1)
    said = shelf.run("stats")
    assert "about 5,0" in said.stderr
    assert "estimated from a sample; --exact counts them" in said.stderr
    assert said.stdout.splitlines()[1].split("\t")[2].startswith("~")


def test_exact_stats_read_every_record(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    put_unsettled(shelf.store)

    (fact,) = shelf.json("stats", "--exact")

    assert (fact["estimated"], fact["records"]) == (False, MANY + 4)
    assert "~" not in shelf.run("stats", "--exact").stdout


@pytest.mark.parametrize("command", [["stats"], ["top", "--once"], ["held"], ["show", "--digest", "0123456789ab"]])
def test_a_store_that_is_twice_as_large_takes_no_more_rows(shelf: Shelf, read: Read, command: list[str]) -> None:
    def rows_read() -> tuple[int, int]:
        read.statements = read.rows = 0
        shelf.run(*command)
        return read.statements, read.rows

    put_many(shelf.store, MANY)
    statements, rows = rows_read()
    put_many(shelf.store, MANY, "mail")

    assert rows_read() == (statements, rows)
    assert rows <= 5 * SAMPLED
    assert statements <= 2 * 50 + 20


def test_gaps_in_the_rows_are_not_counted(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    put_many(shelf.store, MANY, "mail", ttl=0.0)
    shelf.store.purge(MANY)
    put_many(shelf.store, MANY, "refund")

    (fact,) = shelf.json("stats")

    assert fact["records"] == pytest.approx(2 * MANY, rel=0.1)


def test_expired_records_are_no_records_in_an_estimate(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    put_many(shelf.store, MANY, "mail")
    with closing(sqlite3.connect(shelf.path)) as connection, connection:
        connection.execute("UPDATE onefold_records SET expires = 1.0 WHERE operation = 'mail'")

    (fact,) = shelf.json("stats")

    assert [one["operation"] for one in fact["operations"]] == ["charge"]
    assert fact["records"] == pytest.approx(MANY, rel=0.1)


def test_one_scope_is_counted_even_in_a_large_store(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    put_many(shelf.store, 100, scope="acme")

    (fact,) = shelf.json("stats", "--scope", "acme")

    assert (fact["estimated"], fact["records"]) == (False, 100)


# --- every server


@pytest.fixture(params=["postgres", "mysql", "redis", pytest.param("dynamodb", marks=pytest.mark.more)])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def stats_of(url: str, *arguments: str) -> Any:
    said = CliRunner().invoke(app, ["stats", "--store", url, "--format", "json", *arguments])
    assert said.exit_code == 0, said.output
    (fact,) = json.loads(said.stdout)
    return fact


def test_every_store_estimates(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1_200 if url.startswith("dynamodb") else MANY
    # PostgreSQL has not counted this table yet: of a smaller sample, chance might choose too few pages.
    monkeypatch.setattr(samples, "SAMPLE_MAX", count // 4)
    with Guard(url) as guard:
        put_many(guard.store, count)
        put_many(guard.store, count // 4, "mail")
        put_unsettled(guard.store)

        assert guard.store.sample(Query(), 10 * MANY).complete

    fact = stats_of(url)

    assert fact["estimated"] is True
    assert 0.4 < fact["records"] / (1.25 * count) < 2.5
    assert {one["operation"] for one in fact["operations"]} <= {"charge", "mail"}
    if url.startswith(("postgres", "mysql")):
        assert sum(one["held"] for one in fact["operations"]) == 2
    assert stats_of(url, "--exact")["records"] == count + count // 4 + 4


def test_the_servers_count_makes_the_estimate_of_postgres_better(postgres_url: str) -> None:
    with Guard(postgres_url) as guard:
        put_many(guard.store, MANY)
    with postgres_server.connected(postgres_url) as connection:
        connection.execute("ANALYZE onefold_records")

    assert stats_of(postgres_url)["records"] == pytest.approx(MANY, rel=0.02)


def test_operations_beyond_those_that_mysql_looks_at_are_added_in_proportion(
    mysql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onefold.stores.samples.mysql_table.GROUPS_MAX", 2)
    with Guard(mysql_url) as guard:
        for name in "abcd":
            put_many(guard.store, MANY // 4, name)

    fact = stats_of(mysql_url)

    assert [one["operation"] for one in fact["operations"]] == ["a", "b"]
    assert 0.4 < fact["records"] / MANY < 2.5


# --- top


def test_top_of_a_large_store_counts_what_an_index_finds(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    put_unsettled(shelf.store)

    fact = shelf.json("top", "--once")
    charge, mail = fact["operations"]

    # All that is finished is kept forever, and is not in the index.
    assert (fact["partial"], fact["estimated"]) == (False, False)
    assert (charge["held"], charge["abandoned"], mail["running"]) == (2, 1, 1)


def test_top_says_that_running_records_that_expire_may_be_missing(shelf: Shelf) -> None:
    put_many(shelf.store, MANY, ttl=900.0)
    put_unsettled(shelf.store)

    fact, said = shelf.json("top", "--once"), shelf.run("top", "--once")

    assert (fact["partial"], fact["estimated"]) == (False, True)
    assert sum(one["held"] for one in fact["operations"]) == 2
    assert "running records that expire may be missing in so large a store. For all: --exact" in said.stderr
    assert shelf.json("top", "--once", "--exact")["estimated"] is False


def test_top_says_that_more_is_unsettled_than_it_reads(shelf: Shelf) -> None:
    for number in range(SAMPLED + 1):
        shelf.hold(f"{number}")

    fact = shelf.json("top", "--once")

    assert (fact["partial"], fact["estimated"], fact["operations"][0]["held"]) == (True, True, SAMPLED)


def test_top_on_redis_scales_a_sample_up(redis_url: str) -> None:
    with Guard(redis_url) as guard:
        put_many(guard.store, MANY)
        for number in range(MANY):
            running = Entry(address=Address("", "mail", f"{number}"), token=os.urandom(16), lease=600.0, ttl=900.0)
            assert guard.store.claim(running) is None

    said = CliRunner().invoke(app, ["top", "--once", "--store", redis_url, "--format", "json"])
    fact = json.loads(said.stdout)

    assert (fact["estimated"], fact["partial"]) == (True, True)
    assert 0.4 < fact["operations"][0]["running"] / MANY < 2.5


# --- show


@pytest.mark.parametrize("as_key", [False, True])
def test_show_finds_the_digest_of_what_is_held_and_of_what_is_new(shelf: Shelf, as_key: bool) -> None:
    held = shelf.hold("a held one")
    put_many(shelf.store, MANY)
    new = shelf.put("a new one")

    for address in (held, new):
        arguments = [address.digest] if as_key else ["--digest", address.digest]
        assert [fact["key"] for fact in shelf.json("show", *arguments)] == [address.key]


def test_show_says_what_to_do_about_a_digest_that_it_has_not_seen(shelf: Shelf) -> None:
    put_many(shelf.store, 10, "rare")
    put_many(shelf.store, MANY)
    sampled = {one.address for one in samples.look_around(shelf.store, Query()).records}
    hidden = next(
        address
        for address in (Address("", "charge", f"charge_{number:06}") for number in range(MANY))
        if address not in sampled
    )
    rare = Address("", "rare", "rare_000007")

    line = refused(shelf.run("show", "--digest", hidden.digest), 1)

    assert "but the store has more. Narrow it down with --operation and --scope" in line
    assert "--exact" in line
    assert shelf.json("show", "--digest", hidden.digest, "--exact")[0]["key"] == hidden.key
    assert shelf.json("show", "--digest", rare.digest, "--operation", "rare")[0]["key"] == rare.key


def test_show_takes_a_key_that_looks_like_a_digest_in_a_large_store(shelf: Shelf) -> None:
    put_many(shelf.store, MANY)
    shelf.put("0123456789ab")

    assert [fact["key"] for fact in shelf.json("show", "0123456789ab")] == ["0123456789ab"]


def test_show_finds_the_newest_on_postgres(postgres_url: str) -> None:
    address = Address("", "charge", "the newest")
    with Guard(postgres_url, policy=Policy(keep="forever")) as guard:
        put_many(guard.store, MANY)
        assert guard.store.claim(Entry(address=address, token=os.urandom(16), state=State.DONE)) is None

    said = CliRunner().invoke(app, ["show", "--digest", address.digest, "--store", postgres_url])

    assert said.exit_code == 0, said.output
    assert "the newest" in said.stdout


def test_a_store_that_draws_no_samples_is_read_as_a_whole() -> None:
    assert samples.sample_of(MemoryStore(), Query()) is None
    assert samples.in_doubt(MemoryStore(), Query()) is None
