"""Waiters of other processes are told of the end of a record by NOTIFY, which is sent only if somebody waits."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest

from onefold import TX, AsyncGuard, Guard
from onefold._concurrency.generators import run
from onefold._concurrency.waiters import ROOMS
from onefold.stores.postgres import open_async_store, open_store, wakeups
from onefold.stores.postgres.wakeups import MARK, UNMARK, Marks, mark_of
from onefold.stores.postgres.wakeups.async_listener import AsyncListener
from tests.delivery.waiting_tools import CHARGE, LONG, until, waiting, without_polls  # noqa: F401 - a fixture
from tests.processes import Stage, child
from tests.stores.postgres.tools import through_asyncpg
from tests.stores.redis.tools import DONE, claim_of, entry
from tests.support import PATIENCE, PROJECT, Elsewhere, Handler, eventually, in_time

CROWD = 8
DRIVERS = ("psycopg", "asyncpg")


@pytest.fixture
def url(postgres_url: str) -> str:
    return f"{postgres_url}{'&' if '?' in postgres_url else '?'}notify=true"


def of(driver: str, url: str) -> str:
    return through_asyncpg(url) if driver == "asyncpg" else url


@contextmanager
def asking(postgres_url: str) -> Iterator[Any]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def marks(connection: Any) -> int:
    """How many sessions have marked the record."""
    return len(holders(connection))


def holders(connection: Any) -> list[int]:
    """The processes of those sessions."""
    mark = mark_of(CHARGE) % 2**64
    found = connection.execute(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted "
        "AND classid::bigint = %s AND objid::bigint = %s AND database = "
        "(SELECT oid FROM pg_database WHERE datname = current_database())",
        (mark >> 32, mark & 0xFFFFFFFF),
    ).fetchall()
    return [int(pid) for (pid,) in found]


def own(stage: Stage, url: str, ending: str = "returns") -> str:
    """Run the delivery in a process of its own; it stops inside its handler."""

    def handler() -> str:
        stage.at("inside")
        if ending == "raises":
            raise ValueError("declined")
        return "charged"

    with Guard(url) as guard:
        return str(guard.run("charge", "pay_1", handler).value)


@contextmanager
def owner(url: str, ending: str = "returns") -> Iterator[Any]:
    with child(own, url, ending, stops=("inside",)) as process:
        process.reaches("inside")
        yield process


@pytest.mark.usefixtures("without_polls")
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_threads_are_woken_by_an_owner_in_another_process(url: str, postgres_url: str, ending: str) -> None:
    with owner(url, ending) as process, Guard(url) as guard, asking(postgres_url) as connection:
        crowd = [
            Elsewhere(lambda: guard.run("charge", "pay_1", Handler("charged"), wait=LONG).value) for _ in range(CROWD)
        ]
        assert eventually(lambda: waiting() == CROWD and marks(connection) == 1)
        process.go_on()

        assert [one.result() for one in crowd] == ["charged"] * CROWD

    assert not ROOMS


def test_the_statement_of_the_page_counts_the_records_that_are_waited_for(url: str, postgres_url: str) -> None:
    page = (PROJECT / "docs" / "stores" / "postgres.md").read_text("utf-8")
    (statement,) = re.findall(r"```sql\n(SELECT count[^`]* pg_locks [^`]*)```", page)
    with owner(url) as process, Guard(url) as guard, asking(postgres_url) as connection:
        assert connection.execute(statement).fetchone() == (0,)
        crowd = [Elsewhere(lambda: guard.run("charge", "pay_1", Handler(), wait=LONG).value) for _ in range(2)]

        assert eventually(lambda: connection.execute(statement).fetchone() == (1,))

        process.go_on()
        assert [one.result() for one in crowd] == ["charged"] * 2


@pytest.mark.usefixtures("without_polls")
@pytest.mark.parametrize("driver", DRIVERS)
def test_tasks_are_woken_by_an_owner_in_another_process(driver: str, url: str, postgres_url: str) -> None:
    async def story(process: Any, connection: Any) -> list[Any]:
        async with AsyncGuard(of(driver, url)) as guard:
            crowd = [asyncio.create_task(guard.run("charge", "pay_1", Handler(), wait=LONG)) for _ in range(CROWD)]
            await until(lambda: waiting() == CROWD and marks(connection) == 1)
            process.go_on()
            return [outcome.value for outcome in await asyncio.gather(*crowd)]

    with owner(url) as process, asking(postgres_url) as connection:
        assert in_time(story(process, connection)) == ["charged"] * CROWD
        assert eventually(lambda: marks(connection) == 0)

    assert not ROOMS


def heard_by(connection: Any) -> list[str]:
    return [message.payload for message in connection.notifies(timeout=0.05)]


def test_nobody_is_notified_if_nobody_waits(url: str, postgres_url: str) -> None:
    with closing(open_store(url)) as store, asking(postgres_url) as listener:
        listener.execute(wakeups.LISTEN)
        for number in (1, 2):
            one = entry(f"pay_{number}")
            assert store.claim(one) is None
            assert store.finish(claim_of(one), DONE) if number == 1 else store.release(claim_of(one))
        assert heard_by(listener) == []

        one = entry("pay_3")
        store.claim(one)
        assert store.listen(one.address) is True
        assert store.finish(claim_of(one), DONE) is True
        assert heard_by(listener) == [str(mark_of(one.address))]


def test_nothing_inside_a_transaction_notifies(url: str, postgres_url: str) -> None:
    """The inner record is released, and later finished, in the transaction of the handler around it."""
    with Guard(url) as guard, asking(postgres_url) as listener:
        listener.execute(wakeups.LISTEN)
        assert guard.store.listen(CHARGE) is True

        @guard.transactional("charge", key="key", fingerprint=None)
        def charge(key: str, error: Exception | None, *, tx: Any = TX) -> str:
            if error is None:
                return "charged"
            raise error

        @guard.transactional("order", key="key", fingerprint=None)
        def order(key: str, error: Exception | None, *, tx: Any = TX) -> None:
            with suppress(ValueError):
                charge("pay_1", error)

        order("o-1", ValueError("declined"))
        assert guard.store.read(CHARGE) is None
        order("o-2", None)
        assert guard.store.read(CHARGE) is not None

        assert heard_by(listener) == []


def test_behind_pgbouncer_it_polls_and_says_so_once(pgbouncer_url: str, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{pgbouncer_url}{'&' if '?' in pgbouncer_url else '?'}notify=true"
    with caplog.at_level(logging.WARNING, "onefold"), closing(open_store(url)) as store:
        one = entry("pay_1")
        assert store.claim(one) is None

        assert [store.listen(CHARGE), store.listen(CHARGE)] == [False, False]
        assert store.finish(claim_of(one), DONE) is True
    assert len([line for line in caplog.records if "direct connection" in line.getMessage()]) == 1


def test_without_the_option_nobody_listens(postgres_url: str) -> None:
    with closing(open_store(postgres_url)) as store:
        assert store.listen(CHARGE) is False


def test_the_session_ends_with_the_store_and_when_nobody_waits(
    url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asking(postgres_url) as connection:
        store = open_store(url)
        assert store.listen(CHARGE) is True
        assert marks(connection) == 1
        store.close()
        assert eventually(lambda: marks(connection) == 0)

        monkeypatch.setattr(wakeups, "IDLE_SECONDS", 0.02)
        monkeypatch.setattr(wakeups, "LOOK_SECONDS", 0.01)
        assert store.listen(CHARGE) is True
        store.unlisten(CHARGE)
        assert eventually(lambda: marks(connection) == 0)
        store.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_session_of_a_loop_ends_with_it_and_when_nobody_waits(
    driver: str, url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_async_store(of(driver, url))

    async def listen() -> None:
        assert await store.listen(CHARGE) is True

    async def idle(connection: Any) -> None:
        monkeypatch.setattr(wakeups, "IDLE_SECONDS", 0.02)
        await listen()
        store.unlisten(CHARGE)
        await until(lambda: marks(connection) == 0)
        await listen()
        await store.aclose()

    with asking(postgres_url) as connection:
        in_time(listen())
        assert eventually(lambda: marks(connection) == 0)
        in_time(idle(connection))
        assert eventually(lambda: marks(connection) == 0)


@pytest.mark.filterwarnings("ignore:unclosed", "ignore:.*while still open")
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_sessions_of_loops_that_were_closed_abruptly_are_left_to_the_garbage_collector(
    driver: str, url: str, postgres_url: str
) -> None:
    store = open_async_store(of(driver, url))

    async def listen() -> None:
        assert await store.listen(CHARGE)

    with asking(postgres_url) as connection:
        for _ in range(3):
            loop = asyncio.new_event_loop()
            loop.run_until_complete(listen())
            loop.close()
        asyncio.run(listen())
        gc.collect()

        assert eventually(lambda: marks(connection) == 0)


@pytest.mark.parametrize("driver", ["blocking", *DRIVERS])
def test_who_waits_when_the_session_is_lost_marks_the_record_again(driver: str, url: str, postgres_url: str) -> None:
    async def task() -> str:
        async with AsyncGuard(of(driver, url)) as guard:
            return str((await guard.run("charge", "pay_1", Handler(), wait=LONG)).value)

    def thread() -> str:
        with Guard(url) as guard:
            return str(guard.run("charge", "pay_1", Handler(), wait=LONG).value)

    with owner(url) as process, asking(postgres_url) as connection:
        one = Elsewhere(thread if driver == "blocking" else lambda: asyncio.run(task()))
        assert eventually(lambda: waiting() == 1 and marks(connection) == 1)
        (first,) = holders(connection)
        connection.execute("SELECT pg_terminate_backend(%s)", (first,))
        assert eventually(lambda: marks(connection) == 1 and holders(connection) != [first])
        process.go_on()

        assert one.result(PATIENCE) == "charged"


def all_marks(connection: Any) -> int:
    found = connection.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND database = "
        "(SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchone()
    return int(found[0])


@pytest.mark.parametrize("driver", ["blocking", *DRIVERS])
def test_marks_that_nobody_wants_are_removed_with_the_next_one_even_if_that_is_set_already(
    driver: str, url: str, postgres_url: str
) -> None:
    others = [entry(f"pay_{number}").address for number in range(2, 10)]

    async def tasks(connection: Any) -> None:
        store = open_async_store(of(driver, url))
        for address in (*others, CHARGE):
            assert await store.listen(address) is True
        assert all_marks(connection) == len(others) + 1
        for address in (*others, CHARGE):
            store.unlisten(address)
        assert await store.listen(CHARGE) is True
        assert (marks(connection), all_marks(connection)) == (1, 1)
        await store.aclose()

    def thread(connection: Any) -> None:
        with closing(open_store(url)) as store:
            for address in (*others, CHARGE):
                assert store.listen(address) is True
            assert all_marks(connection) == len(others) + 1
            for address in (*others, CHARGE):
                store.unlisten(address)
            assert store.listen(CHARGE) is True
            assert (marks(connection), all_marks(connection)) == (1, 1)

    with asking(postgres_url) as connection:
        if driver == "blocking":
            thread(connection)
        else:
            in_time(tasks(connection))


def test_a_mark_whose_statement_was_interrupted_is_removed_before_it_is_set_again() -> None:
    sent: list[str] = []
    marks, other = Marks(), entry("pay_2").address

    def ask(statement: str) -> bool:
        sent.append(statement)
        return True

    interrupted = marks.set(CHARGE, ask)
    next(interrupted)()
    interrupted.close()
    marks.forget(CHARGE)

    assert run(marks.set(other, ask))
    assert run(marks.set(CHARGE, ask))

    charge, two = mark_of(CHARGE), mark_of(other)
    assert sent == [MARK.format(charge), UNMARK.format(charge), MARK.format(two), MARK.format(charge)]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_session_that_was_lost_and_is_collected_does_not_end_the_one_after_it(
    driver: str, url: str, postgres_url: str
) -> None:
    async def story(connection: Any) -> None:
        store, before = open_async_store(of(driver, url)), len(asyncio.all_tasks())
        assert await store.listen(CHARGE) is True
        connection.execute("SELECT pg_terminate_backend(%s)", holders(connection))
        await until(lambda: not store.listener._sessions)
        assert await store.listen(CHARGE) is True

        gc.collect()
        # The loop makes a task that closes the generator of the one that was collected.
        for _ in range(10):
            await asyncio.sleep(0)
        await until(lambda: len(asyncio.all_tasks()) == before)

        assert len(store.listener._sessions) == 1
        await store.aclose()

    with asking(postgres_url) as connection:
        gc.disable()
        try:
            in_time(story(connection))
        finally:
            gc.enable()
        assert eventually(lambda: all_marks(connection) == 0)


def test_after_a_statement_that_was_cancelled_messages_are_heard(url: str, postgres_url: str) -> None:
    heard: list[str] = []

    async def story(connection: Any) -> None:
        store = open_async_store(url)
        assert await store.listen(CHARGE) is True
        (session,) = store.listener._sessions.values()
        session._line._heard = heard.append
        asked = asyncio.create_task(session._line.ask("SELECT pg_sleep(600)"))
        await until(lambda: bool(connection.execute(SLEEPING).fetchone()[0]))
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked

        connection.execute(f"NOTIFY {wakeups.CHANNEL}, 'hello'")

        await until(lambda: heard == ["hello"])
        await store.aclose()

    with asking(postgres_url) as connection:
        in_time(story(connection))


SLEEPING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ~ 'sleep.600' "
    "AND pid <> pg_backend_pid()"
)


class FakeLine:
    """A connection whose statements are answered when the test says so."""

    def __init__(self) -> None:
        self.lost: Callable[[], None] = lambda: None
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def listen(self, heard: Callable[[str], None], lost: Callable[[], None]) -> bool:
        self.lost = lost
        return True

    async def ask(self, statement: str) -> Any:
        self.asked.set()
        await self.may_answer.wait()
        raise ConnectionError("lost")

    async def close(self) -> None: ...


def test_who_waits_for_its_turn_in_a_session_that_is_lost_does_not_open_it_again() -> None:
    """Nobody would know of it: it would never be closed."""
    lines: list[FakeLine] = []

    async def open_line() -> FakeLine:
        lines.append(FakeLine())
        return lines[-1]

    async def story() -> list[bool]:
        listener = AsyncListener(open_line, "a server")
        first = asyncio.create_task(listener.listen(CHARGE))
        await until(lambda: bool(lines))
        await lines[0].asked.wait()
        second = asyncio.create_task(listener.listen(entry("pay_2").address))
        await asyncio.sleep(0)
        lines[0].lost()
        lines[0].may_answer.set()
        answers = [await first, await second]
        assert not listener._sessions
        return answers

    assert in_time(story()) == [False, False]
    assert len(lines) == 1
