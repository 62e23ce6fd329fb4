"""`fresh`: a batch in the caller's transaction, on SQLite sync and async (section 7; rows 25a, 27 and 55 to 56)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from onefold import (
    AsyncGuard,
    Event,
    Fresh,
    Guard,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    NotInTransaction,
    Policy,
    RecordColumn,
    UsageError,
)
from onefold._delivery.batch import BATCH_MAX
from onefold.stores.sqlite import SqliteStore
from onefold.testing import Clock
from tests.wallet import add, balance, connected, never_opened, records


class Message(NamedTuple):
    id: Any
    amount: int = 10


def sorted_out(guard: Guard | AsyncGuard, connection: sqlite3.Connection, messages: list[Message]) -> Fresh[Message]:
    def key(message: Message) -> object:
        return message.id

    def payload(message: Message) -> object:
        return message.amount

    if isinstance(guard, Guard):
        return guard.within(connection).fresh("credit", messages, key=key, payload=payload)
    return asyncio.run(guard.within(connection).fresh("credit", messages, key=key, payload=payload))


@pytest.fixture(params=[Guard, AsyncGuard])
def guard(request: pytest.FixtureRequest) -> Iterator[Guard | AsyncGuard]:
    guard = request.param(never_opened)
    yield guard
    if isinstance(guard, Guard):
        guard.close()
    else:
        asyncio.run(guard.aclose())


def test_the_new_ones_are_recorded_with_the_work_and_are_seen_the_next_time(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection, path: Path
) -> None:
    messages = [Message("b"), Message("a"), Message("c")]
    with connection:
        first = sorted_out(guard, connection, messages)
        for message in first.new:
            add(connection, message.amount)
    with connection:
        second = sorted_out(guard, connection, [*messages, Message("d")])

    assert (first.new, first.seen, first.unsettled) == (messages, [], [])
    assert (second.new, second.seen, second.unsettled) == ([Message("d")], messages, [])
    assert (balance(path), records(path)) == (30, ["a", "b", "c", "d"])


def test_a_rollback_takes_all_of_them_back(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection, path: Path
) -> None:
    sorted_out(guard, connection, [Message("a"), Message("b")])
    connection.rollback()

    with connection:
        again = sorted_out(guard, connection, [Message("a"), Message("b")])

    assert again.new == [Message("a"), Message("b")]


def test_a_repetition_inside_the_batch_is_seen_and_another_payload_is_refused(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection
) -> None:
    with connection:
        found = sorted_out(guard, connection, [Message("a"), Message("a"), Message("a", amount=99)])

    assert (found.new, found.seen, found.unsettled) == ([Message("a")], [Message("a")], [Message("a", amount=99)])
    assert isinstance(found.problems[0], KeyReused)


def test_what_runs_or_is_held_elsewhere_is_unsettled_and_what_has_expired_is_new(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection, path: Path
) -> None:
    clock = Clock(0.0)
    with Guard(SqliteStore(path, clock=clock), policy=Policy(keep="1s")) as old:
        old.run("credit", "expired", lambda: None)
    with Guard(SqliteStore(path), policy=Policy(after_crash="hold")) as elsewhere:
        with pytest.raises(TimeoutError):
            elsewhere.run("credit", "held", _times_out)

        batches: list[Fresh[Message]] = []

        def while_it_runs() -> None:
            with connection:
                messages = [Message(key) for key in ("expired", "held", "running", "new")]
                batches.append(sorted_out(guard, connection, messages))

        elsewhere.run("credit", "running", while_it_runs)
    (found,) = batches

    assert found.new == [Message("expired"), Message("new")]
    assert found.unsettled == [Message("held"), Message("running")]
    assert [type(problem) for problem in found.problems] == [Held, InProgress]


def _times_out() -> None:
    raise TimeoutError


def test_an_abandoned_run_is_taken_over_and_is_new(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection, path: Path
) -> None:
    long_ago = Clock(0.0)
    store = SqliteStore(path, clock=long_ago)
    with Guard(store, policy=Policy(keep="forever", rerun_within="forever")) as crashed:
        crashed.run("credit", "a", lambda: None)
    with connection:
        connection.execute("UPDATE onefold_records SET state = 'running', expires = NULL")
        found = sorted_out(guard, connection, [Message("a"), Message("b")])

    assert found.new == [Message("a"), Message("b")]


def test_a_message_without_a_usable_key_is_unsettled_and_its_neighbours_are_not(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection
) -> None:
    with connection:
        found = sorted_out(guard, connection, [Message("a"), Message(None), Message("b")])

    assert (found.new, found.unsettled) == ([Message("a"), Message("b")], [Message(None)])
    assert isinstance(found.problems[0], MissingKey)


def test_an_empty_batch_asks_nothing(guard: Guard | AsyncGuard, connection: sqlite3.Connection) -> None:
    with connection:
        assert sorted_out(guard, connection, []) == Fresh(new=[], seen=[], unsettled=[], problems=[])


def test_without_a_transaction_nothing_is_recorded(guard: Guard | AsyncGuard, path: Path) -> None:
    with connected(path, isolation_level=None) as connection, pytest.raises(NotInTransaction):
        sorted_out(guard, connection, [Message("a")])

    assert records(path) == []


def test_more_than_one_statement_holds_are_asked_in_parts(
    guard: Guard | AsyncGuard, connection: sqlite3.Connection
) -> None:
    messages = [Message(number) for number in range(BATCH_MAX + 1)]
    with connection:
        assert sorted_out(guard, connection, messages).new == messages


def test_each_new_one_is_told_as_started_and_finished(connection: sqlite3.Connection) -> None:
    heard: list[Event] = []
    with Guard(never_opened, on_event=[heard.append]) as guard, connection:
        sorted_out(guard, connection, [Message("a"), Message("a")])

    assert [event.kind.value for event in heard] == ["started", "finished", "replayed"]


def test_a_column_of_the_callers_is_for_single_messages(connection: sqlite3.Connection) -> None:
    with Guard(never_opened) as guard, connection, pytest.raises(UsageError, match="Use run"):
        guard.within(connection, record=RecordColumn("payments", "idempotency_key")).fresh("credit", [1], key=str)
