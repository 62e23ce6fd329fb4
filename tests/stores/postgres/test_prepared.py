"""A statement that psycopg has prepared is sent without a cursor; everything else is as it is with one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from onefold import Guard
from onefold._model import Address, Entry
from onefold.stores.postgres import open_store
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.postgres.psycopg.connection import PsycopgConnection
from onefold.stores.sql.dialect import SqlRequest
from onefold.stores.sql.records import of_address
from tests.stores.postgres.tools import another

THERE = Entry(address=Address("", "charge", "there"), token=os.urandom(16), lease=30.0, ttl=86_430.0)
LOOK = SqlRequest(POSTGRES.look, of_address(THERE.address), rows=True)


@pytest.fixture
def conn(postgres_url: str) -> Iterator[PsycopgConnection]:
    """A connection on which psycopg has prepared the statement of a read, in autocommit mode."""
    store = open_store(postgres_url)
    store.claim(THERE)
    store.close()
    with another(postgres_url) as connection:
        conn = PsycopgConnection(connection)
        prepare(conn)
        yield conn


def prepare(conn: PsycopgConnection) -> None:
    for _ in range(conn.connection.prepare_threshold + 2):
        assert len(conn.send(LOOK).rows) == 1


def through_cursors(conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch) -> list[SqlRequest]:
    """The statements that go through a cursor from now on."""
    sent: list[SqlRequest] = []
    real = conn._sent

    def noted(cursor: Any, request: SqlRequest) -> Any:
        sent.append(request)
        return real(cursor, request)

    monkeypatch.setattr(conn, "_sent", noted)
    return sent


def test_a_prepared_statement_needs_no_cursor_and_its_rows_are_the_same(
    conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    (by_cursor,) = conn._sent(conn._cursor, LOOK).fetchall()
    sent = through_cursors(conn, monkeypatch)

    (row,) = conn.send(LOOK).rows

    assert sent == []
    # Durations have passed meanwhile.
    assert [type(value) for value in row] == [type(value) for value in by_cursor]
    assert [value for value in row if not isinstance(value, float)] == [
        value for value in by_cursor if not isinstance(value, float)
    ]


FORGETTING: dict[str, Callable[[Any], object]] = {
    "DEALLOCATE ALL": lambda connection: connection.execute("DEALLOCATE ALL"),
    "DISCARD ALL": lambda connection: connection.execute("DISCARD ALL"),
    "a table is dropped": lambda connection: connection.execute("DROP TABLE IF EXISTS nothing"),
    "another encoding": lambda connection: connection.execute("SET client_encoding = 'LATIN1'"),
    "psycopg was told to prepare nothing": lambda connection: connection._prepared.clear(),
}


@pytest.mark.parametrize("forget", FORGETTING.values(), ids=FORGETTING)
def test_psycopg_stays_in_charge_of_what_is_prepared(
    conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch, forget: Callable[[Any], object]
) -> None:
    forget(conn.connection)
    sent = through_cursors(conn, monkeypatch)

    assert len(conn.send(LOOK).rows) == 1

    assert sent == [LOOK]


def test_it_is_prepared_again_after_it_was_forgotten(conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    conn.connection.execute("DEALLOCATE ALL")
    prepare(conn)
    sent = through_cursors(conn, monkeypatch)

    conn.send(LOOK)

    assert sent == []


def test_where_psycopg_has_to_begin_the_transaction_it_does(
    conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.connection.autocommit = False
    sent = through_cursors(conn, monkeypatch)

    conn.send(LOOK)
    began = conn.connection.info.transaction_status
    conn.send(LOOK)

    assert (began, sent) == (psycopg.pq.TransactionStatus.INTRANS, [LOOK])


def test_its_errors_are_psycopgs(conn: PsycopgConnection, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = through_cursors(conn, monkeypatch)
    with another(postgres_url) as other:
        other.execute("ALTER TABLE onefold_records RENAME TO elsewhere")

    with pytest.raises(psycopg.errors.UndefinedTable, match="onefold_records"):
        conn.send(LOOK)

    assert sent == []
    assert not conn._interrupted


STALE: dict[str, Callable[[Any, Any], object]] = {
    "the type of a column was changed": lambda _, other: other.execute(
        "ALTER TABLE onefold_records ALTER COLUMN attempt TYPE bigint"
    ),
    "psycopg did not see that it was deallocated": lambda mine, _: mine.execute(
        "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"
    ),
}


@pytest.mark.parametrize("make_stale", STALE.values(), ids=STALE)
@pytest.mark.parametrize("inside", [False, True])
def test_a_statement_that_is_stale_fails_once_and_is_prepared_anew(
    conn: PsycopgConnection, postgres_url: str, make_stale: Callable[[Any, Any], object], inside: bool
) -> None:
    with another(postgres_url) as other:
        make_stale(conn.connection, other)
    if inside:
        conn.begin()

    with pytest.raises(psycopg.Error, match=r"cached plan|does not exist"):
        conn.send(LOOK)

    if inside:
        conn.rollback()
        conn.begin()
    for _ in range(conn.connection.prepare_threshold + 2):
        assert len(conn.send(LOOK).rows) == 1


def test_a_lost_connection_is_a_lost_connection(conn: PsycopgConnection, postgres_url: str) -> None:
    with another(postgres_url) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [conn.connection.info.backend_pid])

    with pytest.raises(psycopg.OperationalError):
        conn.send(LOOK)


def test_a_delivery_of_claim_mode_makes_no_cursor(postgres_url: str) -> None:
    with Guard(f"{postgres_url}?purge=no") as guard:
        for number in range(8):
            guard.run("charge", f"pay_{number}", lambda: None)
        (conn,) = guard.store._pool._idle
        conn.__dict__.pop("_cursor")

        guard.run("charge", "pay_new", lambda: None)
        replayed = guard.run("charge", "pay_new", lambda: None).replayed

        assert replayed
        assert "_cursor" not in conn.__dict__
