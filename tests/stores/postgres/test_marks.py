"""A connection of psycopg shows by itself whether the transaction that wrote a record is still open."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
import pytest

from onefold import TX, AsyncGuard, Guard, Policy, UsageError
from onefold.stores.postgres import joined as postgres_joined
from onefold.stores.postgres.marks import MARK_MAX, PARAMETER, Marks
from services.proxy import Proxy
from tests.stores.postgres.tools import SCHEMA, another, balance, records, somebody_waits

CREDIT = "UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'"


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard("memory:") as guard:
        yield guard


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    with Proxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
def connection(proxy: Proxy, guard: Guard) -> Iterator[psycopg.Connection[Any]]:
    """A caller's connection that has delivered before, in autocommit mode."""
    with psycopg.connect(proxy.url(), autocommit=True) as connection:
        # A proxy before may have had this port, and its database other tables.
        postgres_joined.looked.clear()
        with connection.transaction():
            guard.within(connection).run("credit", "before", lambda: None)
        yield connection


def value(connection: psycopg.Connection[Any]) -> str | None:
    return connection.info.parameter_status(PARAMETER)


def test_a_delivery_without_a_result_is_one_round_trip_and_the_parameter_is_as_before(
    proxy: Proxy, connection: psycopg.Connection[Any], guard: Guard
) -> None:
    before, inside = value(connection), list[str | None]()

    for key, end in (("m1", "COMMIT"), ("m2", "ROLLBACK")):
        connection.execute("BEGIN")
        with proxy.counting() as count:
            guard.within(connection).run("credit", key, lambda: inside.append(value(connection)))
        assert count.trips == 1, key
        connection.execute(end.encode())
        assert value(connection) == before
        assert connection.execute(f"SHOW {PARAMETER}".encode()).fetchone() == (before,)

    assert inside == [str(int(before or 0) + 1)] * 2


def run(connection: psycopg.Connection[Any], *statements: str) -> object:
    for statement in statements:
        connection.execute(statement.encode())
    return None


Ends = Callable[[psycopg.Connection[Any], Guard], object]

ENDS: dict[str, Ends] = {
    "commit()": lambda connection, _: connection.commit(),
    "rollback()": lambda connection, _: connection.rollback(),
    "in one message": lambda connection, _: run(connection, f"COMMIT; BEGIN; {CREDIT}"),
    "ROLLBACK AND CHAIN": lambda connection, _: run(connection, "ROLLBACK AND CHAIN", CREDIT),
    "close()": lambda connection, _: connection.close(),
    "a savepoint from before": lambda connection, _: run(connection, "ROLLBACK TO SAVEPOINT earlier", CREDIT),
    # The mark of the delivery before this one must not be taken for its own.
    "a savepoint from before, after another delivery": lambda connection, guard: (
        run(connection, "ROLLBACK TO SAVEPOINT earlier"),
        guard.within(connection).run("credit", "another", lambda: None),
    ),
    "another transaction, and a delivery in it": lambda connection, guard: (
        run(connection, "COMMIT", "BEGIN"),
        guard.within(connection).run("credit", "nested", lambda: None),
    ),
    "another transaction, and deliveries in it": lambda connection, guard: (
        run(connection, "ROLLBACK", "BEGIN"),
        [guard.within(connection).run("credit", f"nested-{number}", lambda: None) for number in range(3)],
    ),
    "another transaction, and a delivery in it that fails": lambda connection, guard: (
        run(connection, "ROLLBACK", "BEGIN"),
        failed(connection, guard),
    ),
}


def failed(connection: psycopg.Connection[Any], guard: Guard) -> object:
    with suppress(ZeroDivisionError):
        guard.within(connection).run("credit", "fails", lambda: 1 / 0)
    return None


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_a_handler_that_ends_its_transaction_is_told(
    connection: psycopg.Connection[Any], guard: Guard, end: Ends, earlier: int
) -> None:
    connection.execute("BEGIN")
    for number in range(earlier):
        guard.within(connection).run("credit", f"earlier-{number}", lambda: None)
    connection.execute("SAVEPOINT earlier")

    with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
        guard.within(connection).run("credit", "m1", lambda: end(connection, guard) and None)


def test_a_handler_around_others_is_asked_about_and_is_not_refused(
    proxy: Proxy, connection: psycopg.Connection[Any], guard: Guard
) -> None:
    def outer() -> None:
        guard.within(connection).run("credit", "inner", lambda: None)
        connection.execute("SAVEPOINT mine")
        guard.within(connection).run("credit", "undone", lambda: None)
        connection.execute("ROLLBACK TO SAVEPOINT mine")

    with connection.transaction():
        guard.within(connection).run("credit", "outer", outer)

    keys = connection.execute("SELECT key FROM onefold_records ORDER BY key").fetchall()
    assert keys == [("before",), ("inner",), ("outer",)]


def test_a_statement_that_failed_after_a_savepoint_is_noticed_although_the_mark_is_still_there(
    connection: psycopg.Connection[Any], guard: Guard
) -> None:
    before, inside = value(connection), list[str | None]()

    def go_on() -> None:
        connection.execute("SAVEPOINT mine")
        with suppress(psycopg.Error):
            connection.execute("SELECT 1 / 0")
        inside.append(value(connection))

    told = pytest.raises(UsageError, match="a statement of the handler failed, and the handler continued")
    with told, connection.transaction():
        guard.within(connection).run("credit", "m1", go_on)

    assert inside == [str(int(before or 0) + 1)]


def test_what_the_handler_does_to_the_parameter_costs_a_look_and_no_more(
    proxy: Proxy, connection: psycopg.Connection[Any], guard: Guard
) -> None:
    with connection.transaction():
        guard.within(connection).run("credit", "m1", lambda: run(connection, f"SET {PARAMETER} = 5000"))

    assert value(connection) == "5000"
    with connection.transaction(), proxy.counting() as count:
        guard.within(connection).run("credit", "m2", lambda: None)
    assert count.trips == 1
    assert value(connection) == "5000"


def test_in_a_transaction_of_our_own_the_commit_needs_no_check_and_every_ending_lets_go_of_the_mark(
    proxy: Proxy,
) -> None:
    with Guard(f"{proxy.url()}?purge=no") as guard:
        seen: list[int] = []

        @guard.transactional("credit", key="key", fingerprint=None, final_errors=[KeyError])
        def credit(key: str, *, tx: Any, error: Exception | None = None) -> None:
            seen.append(int(value(tx) or 0))
            tx.execute(CREDIT)
            if error is not None:
                raise error

        credit("m1")  # type: ignore[call-arg]
        for error in (ValueError(), KeyError()):
            with pytest.raises(type(error)):
                credit(f"m-{error!r}", error=error)  # type: ignore[call-arg]
        with proxy.counting() as count:
            credit("m2")  # type: ignore[call-arg]

    assert [message for message in count.messages if b"COMMIT" in message] == [b"Q\0\0\0\x0bCOMMIT\0"]
    assert len(set(seen)) == 1


def test_a_handler_of_our_own_transaction_that_ends_it_and_delivers_on_its_connection_is_told(proxy: Proxy) -> None:
    """Both deliveries mark the same connection, each for its own transaction."""
    with Guard(f"{proxy.url()}?purge=no") as guard:

        @guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any, ends: bool = False) -> None:
            if ends:
                run(tx, "ROLLBACK", "BEGIN")
                guard.within(tx).run("other", "nested", lambda: None)

        credit("m1")  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
            credit("m2", ends=True)  # type: ignore[call-arg]


async def spent(connection: Any, how: str, left: list[asyncio.Task[Any]]) -> None:
    """Do the work, and leave a statement that fails to a task: under way, or about to be sent."""

    async def fails() -> None:
        if how == "sent later":
            await asyncio.sleep(0)
        await connection.execute("SELECT 1 / 0")

    await connection.execute(CREDIT)
    left.append(asyncio.create_task(fails()))
    if how == "under way":
        await asyncio.sleep(0)


# After the end of `within` nobody sees it but the caller, who commits.
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *(("transactional", how) for how in ("under way", "sent at once", "sent later")),
        *(("within", how) for how in ("under way", "sent at once")),
    ],
)
def test_a_statement_that_a_handler_left_to_a_task_and_that_fails_is_not_overlooked(
    proxy: Proxy, mode: str, how: str
) -> None:
    left: list[asyncio.Task[Any]] = []

    async def story() -> None:
        async with AsyncGuard(proxy.url(), policy=Policy(keep_result=False)) as guard:

            @guard.transactional("credit", key="key")
            async def credit(key: str, *, tx: Any = TX) -> None:
                if key == "m1":
                    await spent(tx, how, left)

            await credit("before")
            if mode == "transactional":
                await credit("m1")
                return
            async with await psycopg.AsyncConnection.connect(proxy.url()) as connection:
                for key in ("first", "m1"):
                    await guard.within(connection).run("credit", key, partial(inside, connection, key))
                    await connection.commit()

    async def inside(connection: Any, key: str) -> None:
        if key == "m1":
            await spent(connection, how, left)

    async def ended() -> BaseException | None:
        raised = (await asyncio.gather(story(), return_exceptions=True))[0]
        await asyncio.wait(left)
        assert isinstance(left[0].exception(), psycopg.errors.DivisionByZero)
        return raised if isinstance(raised, BaseException) else None

    assert isinstance(asyncio.run(ended()), UsageError)
    assert (balance(proxy.url()), "m1" in records(proxy.url())) == (0, False)


def test_a_statement_that_a_handler_left_to_a_thread_and_that_fails_is_not_overlooked(proxy: Proxy) -> None:
    url, threads = proxy.url(), list[threading.Thread]()
    with Guard(url) as guard, another(url) as other:

        @guard.transactional("credit", key="key")
        def credit(key: str, *, tx: Any = TX) -> None:
            if key == "before":
                return
            tx.execute(CREDIT.encode())
            threads.append(threading.Thread(target=fails, args=(tx,)))
            threads[0].start()
            somebody_waits(url)
            threads.append(threading.Thread(target=lambda: other.execute("COMMIT")))
            threads[1].start()

        def fails(tx: psycopg.Connection[Any]) -> None:
            with suppress(psycopg.errors.DivisionByZero):
                tx.execute("SELECT 1 FROM wallet WHERE account = 'riya' FOR UPDATE; SELECT 1 / 0")

        credit("before")
        other.execute("BEGIN")
        other.execute("UPDATE wallet SET balance = 0 WHERE account = 'riya'")

        with pytest.raises(UsageError, match="a statement of the handler failed"):
            credit("m1")

        for thread in threads:
            thread.join()
    assert (balance(url), "m1" in records(url)) == (0, False)


def test_behind_a_pooler_the_server_is_asked(pgbouncer_url: str, guard: Guard) -> None:
    with Proxy(pgbouncer_url) as proxy, psycopg.connect(proxy.url(), autocommit=True, prepare_threshold=None) as caller:
        for number in range(3):
            with caller.transaction():
                caller.execute("SELECT 1")
                with proxy.counting() as count:
                    guard.within(caller).run("credit", f"m{number}", lambda: None)

    assert count.trips == 2


def test_a_mark_is_never_what_a_savepoint_or_another_transaction_restores() -> None:
    """A server in ten lines, and random histories: whoever finds its own mark has its record."""
    chance = random.Random(15)
    proven = 0
    for _ in range(3_000):
        marks, base = Marks(), chance.randint(1, 9)
        marks.is_direct = True
        # The parameter at each savepoint, the last value being the current one; and the records at each.
        stack: list[tuple[int, frozenset[int]]] = [(base, frozenset())]
        active: list[tuple[int, int]] = []
        for number in range(30):
            match chance.choice(["begin", "begin", "end", "savepoint", "back", "commit", "release"]):
                case "begin":
                    mark = marks.next(stack[-1][0])
                    assert mark is not None
                    marks.keep(mark)
                    stack[-1] = mark, stack[-1][1] | {number}
                    active.append((number, mark))
                case "end" if active:
                    delivery, mark = active.pop()
                    marks.let_go()
                    if stack[-1][0] == mark:
                        assert delivery in stack[-1][1]
                        proven += 1
                case "savepoint":
                    stack.append(stack[-1])
                case "back" if len(stack) > 1:
                    stack.pop()
                case "release" if len(stack) > 1:
                    stack[-2:] = stack[-1:]
                case "commit":
                    stack = [(base, frozenset())]

    assert proven > 3_000


def test_what_cannot_be_marked_is_not() -> None:
    marks = Marks()
    assert marks.next(4096) is None
    marks.is_direct = True
    assert (marks.next(4096), marks.next(None), marks.next(MARK_MAX)) == (4097, None, None)
