"""The SQLite store: the whole contract sync and async, and what a file, a disk and a process can do to it."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, StoreUnavailable, UsageError
from onefold._model import Address, Claim, Close, Ending, Entry, Record, State
from onefold.stores.base import Query
from onefold.stores.sqlite import AsyncSqliteStore, SqliteStore, open_async_store, open_store
from onefold.stores.sqlite import connection as sqlite_connection
from onefold.stores.sqlite.dialect import SQLITE, TAKES_NUMBERS
from onefold.testing import AsyncStoreContract, Clock, StoreContract
from tests.processes import CONTEXT
from tests.stores.sql.versions import REFUSED, STILL_USABLE, TOO_NEW
from tests.support import PROJECT

# Far more than any of it needs; it bounds how long a broken one hangs.
PATIENCE = 120.0

# For those who write at the same time: longer than a machine pauses while one of them has the file.
IN_TURN: dict[str, Any] = {"busy_timeout": 60.0}

NOBODY = 65_534


class TestContract(StoreContract):
    """From threads, and from processes."""

    @pytest.fixture(autouse=True)
    def set_up(self, tmp_path: Path) -> None:
        # The other processes have the machine's clock, so that ours begins there.
        self.clock = Clock(time.time())
        self.path = tmp_path / "records.db"

    def process_source(self) -> Any:
        return partial(SqliteStore, self.path, **IN_TURN)

    def open_store(self) -> SqliteStore:
        return SqliteStore(self.path, clock=self.clock, **IN_TURN)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestAsyncContract(AsyncStoreContract):
    """From tasks, and from processes."""

    @pytest.fixture(autouse=True)
    def set_up(self, tmp_path: Path) -> None:
        self.clock = Clock(time.time())
        self.path = tmp_path / "records.db"

    def process_source(self) -> Any:
        return partial(AsyncSqliteStore, self.path, **IN_TURN)

    def open_store(self) -> AsyncSqliteStore:
        return AsyncSqliteStore(self.path, clock=self.clock, **IN_TURN)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


# Words.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {
        "address": Address("", "charge", key),
        "token": os.urandom(16),
        "lease": 30.0,
        "ttl": 90.0,
    }
    return Entry(**(usual | fields))


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


DONE = Ending(state=State.DONE, ttl=60.0, result=b"result")


@contextmanager
def another(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that is not the store's."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        yield connection


@contextmanager
def writing_elsewhere(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody has begun to write, and does not end."""
    with another(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def keys_in(path: Path) -> list[str]:
    with another(path) as connection:
        return [key for (key,) in connection.execute("SELECT key FROM onefold_records ORDER BY key")]


def connections(store: SqliteStore) -> list[sqlite3.Connection]:
    return [line.do(lambda records: records.connection) for line in (store._reading, store._writing)]


def one_line(refused: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which must name the cause for whoever wants to know more."""
    message = str(refused.value)
    assert "\n" not in message
    return message


def in_processes(count: int, target: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function answers in each of so many new processes; it is given a barrier that all of them share."""
    start, answers = CONTEXT.Barrier(count), CONTEXT.SimpleQueue()
    processes = [CONTEXT.Process(target=_tell, args=(target, start, answers, *args), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == 0, f"a process ended with {process.exitcode}"
        return [answers.get() for _ in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        answers.close()


def _tell(target: Callable[..., Any], start: Any, answers: Any, *args: Any) -> None:
    answers.put(target(start, *args))


# Many processes on one file.


def _race(start: Any, directory: Path) -> tuple[list[bool], list[str]]:
    """Which of the new files this process was the first to claim in, and which keys of one file it has won."""
    first = []
    for number in range(20):
        with closing(SqliteStore(directory / f"new-{number}.db", **IN_TURN)) as store:
            start.wait(PATIENCE)
            first.append(store.claim(entry()) is None)
    won = []
    with closing(SqliteStore(directory / "shared.db", **IN_TURN)) as store:
        start.wait(PATIENCE)
        for number in range(100):
            mine = entry(f"key-{number}")
            if store.claim(mine) is None:
                assert store.finish(claim_of(mine), DONE)
                won.append(mine.address.key)
    return first, won


Raced = tuple[Path, list[tuple[list[bool], list[str]]]]


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Raced:
    directory = tmp_path_factory.mktemp("eight")
    return directory, in_processes(8, _race, directory)


def test_eight_processes_that_start_together_make_one_schema(raced: Raced) -> None:
    directory, answers = raced

    assert [sum(winners) for winners in zip(*(first for first, _ in answers), strict=True)] == [1] * 20
    for number in range(20):
        with another(directory / f"new-{number}.db") as connection:
            assert connection.execute("SELECT version FROM onefold_schema").fetchall() == [(2,)]


def test_eight_processes_on_one_file_run_each_key_once(raced: Raced) -> None:
    directory, answers = raced

    assert sorted(key for _, won in answers for key in won) == sorted(f"key-{number}" for number in range(100))
    with closing(SqliteStore(directory / "shared.db")) as store:
        assert len(store.browse(Query(state=State.DONE), 200)) == 100


# The schema.


def test_a_table_of_a_newer_version_is_refused_and_nothing_runs(store: SqliteStore, path: Path) -> None:
    store.purge(1)
    store.close()
    with another(path) as connection:
        connection.execute(TOO_NEW)

    with Guard(store) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "key", lambda: pytest.fail("it ran"))

    assert one_line(refused).endswith(f"are of {REFUSED}. Nothing ran. Upgrade Onefold")
    assert keys_in(path) == []


def test_a_newer_version_that_says_so_is_still_usable(store: SqliteStore, path: Path) -> None:
    store.purge(1)
    store.close()
    with another(path) as connection:
        connection.execute(STILL_USABLE)
        connection.execute("ALTER TABLE onefold_records ADD COLUMN later TEXT NOT NULL DEFAULT ''")

    assert store.claim(entry()) is None
    assert isinstance(store.claim(entry()), Record)


def test_without_auto_schema_a_missing_file_is_not_made(path: Path) -> None:
    store = SqliteStore(path, auto_schema=False)

    with pytest.raises(StoreUnavailable, match="`onefold schema --store URL --apply`"):
        store.claim(entry())

    assert not path.exists()


def test_without_auto_schema_missing_tables_are_not_made(path: Path) -> None:
    with another(path) as connection:
        connection.execute("CREATE TABLE wallet (account TEXT)")

    with closing(SqliteStore(path, auto_schema=False)) as store, pytest.raises(StoreUnavailable) as refused:
        store.claim(entry())

    assert "`onefold schema --store URL --apply`" in one_line(refused)
    with another(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("wallet",)]


def test_without_auto_schema_tables_that_are_there_are_used(store: SqliteStore, path: Path) -> None:
    store.purge(1)

    with closing(SqliteStore(path, auto_schema=False)) as careful:
        assert careful.claim(entry()) is None


def test_the_applications_own_file_keeps_its_tables_and_its_user_version(path: Path) -> None:
    with another(path) as connection:
        connection.execute("CREATE TABLE wallet (account TEXT)")
        connection.execute("PRAGMA user_version = 42")

    with closing(SqliteStore(path)) as store:
        assert store.claim(entry()) is None

    with another(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchall() == [(42,)]
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert names == {"wallet", "onefold_records", "onefold_schema"}


def test_a_person_can_read_the_records(store: SqliteStore, path: Path) -> None:
    charged, sent = entry("pay_7f3a"), entry("mail_1", address=Address("tenant", "send-welcome", "mail_1"))
    store.claim_all([charged, sent])
    store.finish(claim_of(charged), DONE)

    with another(path) as connection:
        rows = connection.execute("SELECT scope, operation, key, state FROM onefold_records ORDER BY key").fetchall()
        ((age,),) = connection.execute(
            "SELECT julianday('now') - julianday(changed, 'unixepoch') FROM onefold_records WHERE state = 'done'"
        )

    assert rows == [("tenant", "send-welcome", "mail_1", "running"), ("", "charge", "pay_7f3a", "done")]
    assert abs(age) < 0.01


# What a disk and a file can do.


def test_a_full_disk_is_one_clear_line_and_nothing_runs(store: SqliteStore, path: Path) -> None:
    store.claim(entry("before"))
    # The size of a disk, as SQLite sees it: the error is the one that a full disk gives.
    store._writing.do(lambda records: records.connection.execute("PRAGMA max_page_count = 1").fetchall())
    large = entry("large", state=State.DONE, result=bytes(100_000))

    with pytest.raises(StoreUnavailable) as refused:
        store.claim(large)

    assert one_line(refused) == f"{path}: the disk is full. Free some space, or purge records"
    assert isinstance(refused.value.__cause__, sqlite3.OperationalError)
    assert keys_in(path) == ["before"]
    # Now there is space again: the store has opened the file anew.
    assert store.claim(large) is None


def test_a_batch_that_finds_the_disk_full_leaves_nothing(store: SqliteStore, path: Path) -> None:
    store.claim(entry("before"))
    store._writing.do(lambda records: records.connection.execute("PRAGMA max_page_count = 8").fetchall())

    with pytest.raises(StoreUnavailable, match="the disk is full"):
        store.claim_all([entry(f"key-{number:04}") for number in range(1_000)])

    assert keys_in(path) == ["before"]
    assert store.claim(entry("after")) is None


def test_a_disk_that_fails_is_one_clear_line(store: SqliteStore, path: Path) -> None:
    store.claim(entry("before"))
    with _files_at_most(os.path.getsize(f"{path}-wal")), pytest.raises(StoreUnavailable) as refused:
        store.claim(entry("after"))

    assert "the disk failed to read or write" in one_line(refused)
    assert keys_in(path) == ["before"]
    assert store.claim(entry("after")) is None


@contextmanager
def _files_at_most(size: int) -> Iterator[None]:
    """Writing beyond this size fails with EFBIG, in all of the process. Python itself ignores the signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A directory that everybody may enter; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@contextmanager
def _without_rights() -> Iterator[None]:
    """Root may write whatever is read-only, so that it has to become somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_file_is_one_clear_line_and_nothing_runs(shelf: Path) -> None:
    path = shelf / "records.db"
    with another(path) as connection:
        connection.execute("CREATE TABLE wallet (account TEXT)")
    path.chmod(0o444)
    shelf.chmod(0o555)

    try:
        with _without_rights(), Guard(SqliteStore(path)) as guard, pytest.raises(StoreUnavailable) as refused:
            guard.run("charge", "key", lambda: pytest.fail("it ran"))
    finally:
        shelf.chmod(0o755)

    assert one_line(refused).endswith("the file cannot be written. Let this user write the file and its directory")


def test_a_file_that_became_read_only_is_refused_when_writing(shelf: Path) -> None:
    path = shelf / "records.db"
    with closing(SqliteStore(path)) as store:
        store.claim(entry("before"))
    path.chmod(0o444)
    shelf.chmod(0o777)

    with _without_rights(), closing(SqliteStore(path)) as store, pytest.raises(StoreUnavailable) as refused:
        store.claim(entry("after"))

    assert "the file cannot be written" in one_line(refused)
    shelf.chmod(0o755)


def test_a_file_that_is_not_a_database_is_one_clear_line_and_is_not_touched(path: Path) -> None:
    path.write_text("Dear diary, " * 1_000)
    before = path.read_bytes()

    with Guard(SqliteStore(path)) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "key", lambda: pytest.fail("it ran"))

    assert one_line(refused) == f"{path}: this file is not an SQLite database. Name another one"
    assert path.read_bytes() == before


def test_a_damaged_file_is_one_clear_line(store: SqliteStore, path: Path) -> None:
    store.claim_all([entry(f"key-{number}") for number in range(1_000)])
    store.close()
    damaged = bytearray(path.read_bytes())
    damaged[4_096:] = b"\xff" * (len(damaged) - 4_096)
    path.write_bytes(damaged)

    with pytest.raises(StoreUnavailable) as refused:
        store.claim(entry())

    assert "the database is damaged" in one_line(refused)


def _a_directory(shelf: Path) -> Path:
    return shelf


def _a_missing_directory(shelf: Path) -> Path:
    return shelf / "missing" / "deeper" / "records.db"


def _a_file_on_the_way(shelf: Path) -> Path:
    (shelf / "file").touch()
    return shelf / "file" / "records.db"


def _a_closed_directory(shelf: Path) -> Path:
    (shelf / "closed").mkdir(0o600)
    return shelf / "closed" / "records.db"


def _a_closed_file(shelf: Path) -> Path:
    (shelf / "records.db").touch(0o000)
    return shelf / "records.db"


def _a_directory_to_read(shelf: Path) -> Path:
    (shelf / "reading").mkdir(0o555)
    return shelf / "reading" / "records.db"


def _a_log_that_cannot_be_written(shelf: Path) -> Path:
    path = shelf / "reading" / "records.db"
    path.parent.mkdir()
    with closing(SqliteStore(path)) as store:
        store.purge(1)
    path.chmod(0o666)
    path.parent.chmod(0o555)
    return path


def _a_link_to_nothing(shelf: Path) -> Path:
    (shelf / "link.db").symlink_to(shelf / "missing" / "records.db")
    return shelf / "link.db"


PATHS: dict[Callable[[Path], Path], str] = {
    _a_directory: "{path}: the file cannot be opened: it is a directory. Name a file in it: {path}/onefold.db",
    _a_missing_directory: "there is no directory {shelf}/missing. Create it, or correct the path",
    _a_file_on_the_way: "{shelf}/file is not a directory. Correct the path",
    _a_closed_directory: "this user may not enter {shelf}/closed. Let it, or run as another user",
    _a_closed_file: "this user may not read and write it. Let it (chown, chmod), or run as another user",
    _a_directory_to_read: "it is not there, and this user may not write to {shelf}/reading. Let it (chown, chmod)",
    _a_log_that_cannot_be_written: "its log is kept next to it, and this user may not write to {shelf}/reading. Let it "
    "(chown, chmod)",
    _a_link_to_nothing: "it is a link to {shelf}/missing/records.db, which is not there. Correct the link",
}


@pytest.mark.parametrize("make_path", PATHS)
def test_a_place_where_no_file_can_be_is_one_clear_line_that_says_what_to_do(
    shelf: Path, make_path: Callable[[Path], Path]
) -> None:
    path = make_path(shelf)

    with _without_rights(), closing(SqliteStore(path)) as store, pytest.raises(StoreUnavailable) as refused:
        store.claim(entry())

    assert one_line(refused).endswith(PATHS[make_path].format(path=path, shelf=shelf))


def test_a_directory_is_called_one_by_whoever_only_reads_too(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)

    for look in (store.facts, store.schema_exists):
        with pytest.raises(StoreUnavailable) as refused:
            look()
        assert "it is a directory" in one_line(refused)


def test_every_other_error_is_translated_too_and_the_store_recovers(store: SqliteStore, path: Path) -> None:
    store.claim(entry())
    with another(path) as connection:
        connection.execute("DROP TABLE onefold_records")

    with pytest.raises(StoreUnavailable) as refused:
        store.read(entry().address)

    assert "no such table" in one_line(refused)
    assert store.claim(entry()) is None


# Waiting for other writers.


def test_a_busy_file_is_waited_for_and_then_refused(store: SqliteStore, path: Path) -> None:
    store.purge(1)
    impatient = SqliteStore(path, busy_timeout=0.05)

    with writing_elsewhere(path), closing(impatient), pytest.raises(StoreUnavailable) as refused:
        impatient.claim(entry())

    message = one_line(refused)
    assert message.startswith(f"{path}: another connection has been writing for 0.05s")
    assert "a transaction that was left open" in message
    assert isinstance(refused.value.__cause__, sqlite3.OperationalError)


def test_a_writer_goes_on_when_the_other_has_ended(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.purge(1)
    with writing_elsewhere(path) as other:
        monkeypatch.setattr(time, "sleep", partial(_commit_once, other))

        assert store.claim(entry()) is None


def test_a_new_file_that_is_busy_is_waited_for_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing_elsewhere(path) as other, closing(SqliteStore(path)) as store:
        monkeypatch.setattr(time, "sleep", partial(_commit_once, other))

        assert store.claim(entry()) is None


def _commit_once(connection: sqlite3.Connection, _seconds: float) -> None:
    """Whoever sleeps: also a thread that has nothing to do with this."""
    if connection.in_transaction:
        connection.execute("COMMIT")


def test_duplicates_are_answered_while_another_process_writes(store: SqliteStore, path: Path) -> None:
    owner, others = entry("one"), entry("two")
    store.claim_all([owner, others])

    with writing_elsewhere(path):
        assert isinstance(store.claim(entry("one")), Record)
        assert store.claim(owner) is None
        assert [isinstance(answer, Record) for answer in store.claim_all([entry("one"), others])] == [True, False]


def test_threads_that_wait_for_one_busy_file_do_not_add_up_their_waiting(store: SqliteStore, path: Path) -> None:
    store.purge(1)
    impatient, refused = SqliteStore(path, busy_timeout=0.5), []

    def ask(number: int) -> None:
        try:
            impatient.claim(entry(f"key-{number}"))
        except StoreUnavailable as error:
            refused.append(error)

    with writing_elsewhere(path), closing(impatient):
        began = time.monotonic()
        _in_threads([partial(ask, number) for number in range(60)])
        took = time.monotonic() - began

    assert len(refused) == 60
    # One after the other they would take half a minute.
    assert took < 60 * 0.5 / 2


def _in_threads(asks: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=ask, daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


# What each operation costs.


@pytest.mark.parametrize(("sync", "level"), [("full", 2), ("normal", 1)])
def test_write_ahead_log_and_sync_are_as_asked(path: Path, sync: Any, level: int) -> None:
    with closing(SqliteStore(path, sync=sync)) as store:
        for connection in connections(store):
            assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
            assert connection.execute("PRAGMA synchronous").fetchall() == [(level,)]


def test_full_sync_is_the_default(store: SqliteStore) -> None:
    assert [connection.execute("PRAGMA synchronous").fetchall() for connection in connections(store)] == [[(2,)]] * 2


@contextmanager
def traced(store: SqliteStore) -> Iterator[tuple[list[str], list[str]]]:
    """The first words of the statements that each connection executes: those that read, and those that write."""
    said: tuple[list[str], list[str]] = ([], [])
    for connection, statements in zip(connections(store), said, strict=True):
        connection.set_trace_callback(partial(_note_first_word, statements))
    yield said
    for connection in connections(store):
        connection.set_trace_callback(None)


def _note_first_word(statements: list[str], statement: str) -> None:
    statements.append(statement.split(maxsplit=1)[0])


def test_a_new_key_costs_one_write_and_its_finish_one_write(store: SqliteStore) -> None:
    mine = entry()

    with traced(store) as (reads, writes):
        store.claim(mine)
        assert (reads, writes) == ([], ["INSERT"])
        store.finish(claim_of(mine), DONE)

    assert (reads, writes) == ([], ["INSERT", "UPDATE"])


@contextmanager
def writing_nothing(store: SqliteStore, path: Path) -> Iterator[None]:
    """Nothing is written to the file meanwhile."""
    with another(path) as watcher:
        before = watcher.execute("PRAGMA data_version").fetchall()
        changes = [connection.total_changes for connection in connections(store)]
        yield
        assert watcher.execute("PRAGMA data_version").fetchall() == before
        assert [connection.total_changes for connection in connections(store)] == changes


def test_after_a_duplicate_the_next_one_costs_one_look_and_a_new_key_one_more(store: SqliteStore, path: Path) -> None:
    store.claim(entry())

    with traced(store) as (reads, writes):
        with writing_nothing(store, path):
            store.claim(entry())
            # A new one was expected.
            assert (reads, writes) == ([], ["INSERT", "SELECT"])
            writes.clear()
            store.claim(entry())
            assert (reads, writes) == (["SELECT"], [])
        store.claim(entry("other"))

    assert (reads, writes) == (["SELECT"] * 2, ["INSERT"])


@pytest.mark.skipif(not TAKES_NUMBERS, reason="this Python warns of numbered values")
def test_a_duplicate_that_is_done_is_found_by_one_look_unless_a_new_key_is_expected(store: SqliteStore) -> None:
    mine = entry()
    store.claim(mine)
    store.finish(claim_of(mine), DONE)

    assert store.find_done(mine.address) is None
    store.claim(entry())
    with traced(store) as (reads, writes):
        found = store.find_done(mine.address)
        assert store.find_done(entry("other").address) is None
        assert store.find_done(mine.address) is None

    assert found is not None
    assert (found.attempt, found.result, found.omitted, found.remark) == (1, DONE.result, False, "")
    assert (reads, writes) == (["SELECT"] * 2, [])


def test_a_duplicate_waits_neither_for_another_process_nor_for_a_thread(store: SqliteStore, path: Path) -> None:
    store.claim(entry())
    found: list[object] = []

    with another(path) as writer:
        writer.execute("BEGIN IMMEDIATE")
        found.append(store.claim(entry()))
        writer.execute("ROLLBACK")
    store.claim(entry("new"))
    held, ends = threading.Event(), threading.Event()

    def hold(_records: object) -> None:
        held.set()
        assert ends.wait(PATIENCE)

    thread = threading.Thread(target=store._writing.do, args=(hold,))
    thread.start()
    assert held.wait(PATIENCE)
    try:
        found.append(store.claim(entry()))
    finally:
        ends.set()
        thread.join()

    assert all(isinstance(one, Record) for one in found)


def test_extend_release_and_take_over_cost_one_write_each(store: SqliteStore) -> None:
    mine, successor = entry(), entry()
    store.claim(mine)
    seen = store.read(mine.address)

    with traced(store) as (reads, writes):
        store.claim(successor, replacing=seen)
        store.extend(claim_of(successor))
        store.release(claim_of(successor))

    assert (reads, writes) == ([], ["UPDATE", "UPDATE", "DELETE"])


def test_a_batch_is_one_transaction(store: SqliteStore) -> None:
    entries = [entry(f"key-{number}") for number in range(3)]

    with traced(store) as (_, writes):
        store.claim_all(entries)
        assert writes == ["BEGIN", *["INSERT"] * 3, "COMMIT"]
        writes.clear()
        store.extend_all([claim_of(each) for each in entries])
        assert writes == ["BEGIN", *["UPDATE"] * 3, "COMMIT"]
        writes.clear()
        store.close_all([Close(claim_of(each), DONE) for each in entries])
        assert writes == ["BEGIN", *["UPDATE"] * 3, "COMMIT"]


def test_a_batch_of_duplicates_writes_nothing(store: SqliteStore) -> None:
    keys = [f"key-{number}" for number in range(3)]
    store.claim_all([entry(key) for key in keys])

    with traced(store) as (reads, writes):
        answers = store.claim_all([entry(key) for key in keys])

    assert all(isinstance(answer, Record) for answer in answers)
    assert (reads, writes) == (["SELECT"] * 3, [])


def test_purge_finds_what_is_over_by_an_index(store: SqliteStore, path: Path) -> None:
    store.purge(1)

    with another(path) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {SQLITE.remove_expired}", {"now": 0.0, "limit": 1}).fetchall()

    steps = [step for *_, step in plan]
    assert any("USING COVERING INDEX onefold_records_expires" in step for step in steps), steps
    assert not any("TEMP B-TREE" in step for step in steps), steps


# A record that comes and goes during one claim.


def test_a_claim_whose_obstacle_vanishes_is_written_after_all(store: SqliteStore, path: Path) -> None:
    mine = entry()
    _come_and_go(store, path, mine.address, times=3)

    assert store.claim(mine) is None

    assert _token(path) == mine.token


def test_a_claim_does_not_try_for_ever(store: SqliteStore, path: Path) -> None:
    _come_and_go(store, path, entry().address, times=1_000)

    with pytest.raises(StoreUnavailable, match=r"came and went 8 times"):
        store.claim(entry())


def _come_and_go(store: SqliteStore, path: Path, address: Address, times: int) -> None:
    """Another process claims just before we do, and releases just before we look what is in the way."""
    rival, left = SqliteStore(path), [times]
    token = os.urandom(16)

    def meet(statement: str) -> None:
        if statement.startswith("INSERT") and left[0]:
            left[0] -= 1
            rival.claim(entry(address=address, token=token))
        elif statement.startswith("SELECT"):
            rival.release(Claim(address, token))

    _, writer = connections(store)
    writer.set_trace_callback(meet)


def _token(path: Path) -> bytes:
    with another(path) as connection:
        ((token,),) = connection.execute("SELECT token FROM onefold_records")
        return bytes(token)


# Ends of processes, threads and stores.


def _claim_and_say(path: str) -> None:
    with closing(SqliteStore(path)) as store:
        for number in range(1_000_000):
            mine = entry(f"key-{number}")
            assert store.claim(mine) is None
            assert store.finish(claim_of(mine), DONE)
            print(mine.address.key, flush=True)


def test_what_was_answered_survives_a_kill(path: Path) -> None:
    command = f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
    command += f"from tests.stores.sqlite.test_store import _claim_and_say; _claim_and_say({str(path)!r})"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        answered = 50 + len([line for line in process.stdout if line.endswith("\n")])

    with closing(SqliteStore(path)) as store:
        for number in range(answered):
            found = store.read(entry(f"key-{number}").address)
            assert found is not None
            assert (found.state, found.result) == (State.DONE, b"result")
        assert store.claim(entry("next")) is None


def _fork(child: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def _ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _fork_and_close_in_the_parent(_start: Any, path: Path) -> list[str]:
    store = SqliteStore(path)
    store.claim(entry("parent"))
    here, there = os.pipe()
    ready, said = os.pipe()

    def child() -> None:
        assert store.claim(entry("child-1")) is None
        os.write(said, b"!")
        os.read(here, 1)
        assert store.claim(entry("child-2")) is None

    pid = _fork(child)
    os.read(ready, 1)
    # The parent is the last that SQLite knows of, unless the child really holds a lock of its own.
    store.close()
    os.write(there, b"!")
    assert _ended_well(pid)
    return keys_in(path)


def test_what_a_forked_child_writes_survives_the_close_of_its_parent(path: Path) -> None:
    assert in_processes(1, _fork_and_close_in_the_parent, path) == [["child-1", "child-2", "parent"]]


def _fork_amid_writes(_start: Any, path: Path) -> list[str]:
    store, over = SqliteStore(path, **IN_TURN), threading.Event()

    def write() -> None:
        for number in range(1_000_000):
            if over.is_set():
                return
            assert store.claim(entry(f"parent-{number}")) is None

    def child(number: int) -> None:
        assert store.claim(entry(f"child-{number}")) is None
        store.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert [_ended_well(_fork(partial(child, number))) for number in range(10)] == [True] * 10
    over.set()
    writer.join()
    store.close()
    return [key for key in keys_in(path) if key.startswith("child")]


def test_a_process_may_fork_while_its_threads_write(path: Path) -> None:
    assert in_processes(1, _fork_amid_writes, path) == [[f"child-{number}" for number in range(10)]]


def _fork_amid_an_operation(_start: Any, path: Path) -> list[str]:
    """A signal handler that forks, say: the thread that forks is the one that holds the connection."""
    children: list[int] = []

    def clock() -> float:
        if not children:
            children.append(0)
            children[0] = _fork(child)
        return time.time()

    def child() -> None:
        assert store.claim(entry("child")) is None
        store.close()

    sqlite_connection.FORK_PATIENCE = PATIENCE  # type: ignore[misc]
    store, began = SqliteStore(path, clock=clock), time.monotonic()
    assert store.claim(entry("parent")) is None
    # It did not wait for itself.
    assert time.monotonic() - began < PATIENCE / 2
    assert _ended_well(children[0])
    store.close()
    return keys_in(path)


def test_a_fork_amid_an_operation_neither_hangs_nor_shares_the_connection(path: Path) -> None:
    assert in_processes(1, _fork_amid_an_operation, path) == [["child", "parent"]]


def _fork_an_async_store(_start: Any, path: Path) -> list[str]:
    store = AsyncSqliteStore(path)
    asyncio.run(_claims(store, "parent"))
    pid = _fork(lambda: asyncio.run(_claims(store, "child")))
    assert _ended_well(pid)
    asyncio.run(store.aclose())
    return keys_in(path)


async def _claims(store: AsyncSqliteStore, key: str) -> None:
    assert await store.claim(entry(key)) is None


def test_a_forked_child_has_a_thread_of_its_own_behind_the_async_face(path: Path) -> None:
    assert in_processes(1, _fork_an_async_store, path) == [["child", "parent"]]


def test_close_closes_every_connection_and_later_use_opens_new_ones(store: SqliteStore, path: Path) -> None:
    wal = Path(f"{path}-wal")
    _in_threads([partial(store.claim, entry(f"key-{number}")) for number in range(8)])
    opened = connections(store)
    assert wal.exists()

    store.close()

    # SQLite removes the log when the last connection is closed.
    assert not wal.exists()
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")
    assert store.claim(entry("later")) is None
    store.close()
    store.close()
    assert not wal.exists()


def test_a_store_that_nobody_closes_closes_itself(path: Path) -> None:
    store = SqliteStore(path)
    store.claim(entry())

    del store
    gc.collect()

    assert not Path(f"{path}-wal").exists()


def test_a_process_that_ends_without_closing_says_nothing_and_leaves_no_log(path: Path) -> None:
    command = f"from onefold.stores.sqlite import SqliteStore; store = SqliteStore({str(path)!r}); store.purge(1)"

    ended = subprocess.run([sys.executable, "-W", "error", "-c", command], capture_output=True, text=True, check=True)

    assert ended.stderr == ""
    assert path.exists()
    assert not Path(f"{path}-wal").exists()


def test_an_interrupted_batch_leaves_nothing_and_blocks_nobody(path: Path) -> None:
    interrupt_at = [0]

    def clock() -> float:
        interrupt_at[0] -= 1
        if interrupt_at[0] == 0:
            raise KeyboardInterrupt
        return time.time()

    with closing(SqliteStore(path, clock=clock)) as store:
        entries = [entry(f"key-{number}") for number in range(3)]
        # Three looks, then two writes.
        interrupt_at[0] = 5
        with pytest.raises(KeyboardInterrupt):
            store.claim_all(entries)

        assert keys_in(path) == []
        with writing_elsewhere(path):
            pass
        assert store.claim_all(entries) == [None] * 3


def test_a_transaction_that_was_left_open_does_not_swallow_the_next_operation(store: SqliteStore, path: Path) -> None:
    # As a second interrupt leaves it, in the middle of the clean-up after the first.
    connections(store)[1].execute("BEGIN")

    assert store.claim(entry()) is None

    assert keys_in(path) == ["key"]


def test_a_relative_path_stays_in_the_directory_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with closing(SqliteStore("records.db")) as store:
        monkeypatch.chdir(tmp_path / "elsewhere")

        store.claim(entry())

    assert keys_in(tmp_path / "records.db") == ["key"]


# The async face.


def test_one_async_store_serves_several_event_loops_in_turn(path: Path) -> None:
    store = AsyncSqliteStore(path)

    asyncio.run(_claims(store, "first"))
    asyncio.run(_claims(store, "second"))
    asyncio.run(store.aclose())

    assert keys_in(path) == ["first", "second"]
    assert not Path(f"{path}-wal").exists()


def test_one_thread_reads_and_one_writes_for_an_async_store(path: Path) -> None:
    before = set(threading.enumerate())

    def threads() -> int:
        return len(set(threading.enumerate()) - before)

    async def ask() -> None:
        store = AsyncSqliteStore(path)
        assert threads() == 0
        await asyncio.gather(*(store.claim(entry(f"key-{number}")) for number in range(50)))
        assert threads() == 2
        await store.aclose()
        assert threads() == 0

    asyncio.run(ask())


def test_a_cancelled_claim_is_ours_or_was_never_written(path: Path) -> None:
    async def ask() -> None:
        store, mine = AsyncSqliteStore(path), entry()
        task = asyncio.ensure_future(store.claim(mine))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        # What the driver of a guard does: it sends the operation again.
        assert await store.claim(mine) is None
        await store.aclose()

    asyncio.run(ask())


# Guards, and URLs.


def test_a_guard_replays_after_the_process_has_ended(path: Path) -> None:
    def charge(amount: int) -> int:
        with closing(SqliteStore(path)) as store, Guard(store) as guard:
            return guard.run("charge", "pay_7f3a", lambda: amount).value

    assert [charge(4200), charge(1)] == [4200, 4200]


def test_an_async_guard_replays_what_a_guard_has_finished(path: Path, store: SqliteStore) -> None:
    with Guard(store) as guard:
        guard.run("charge", "pay_7f3a", lambda: 4200)

    async def again() -> Any:
        async def charge() -> int:
            return 1

        async_store = AsyncSqliteStore(path)
        async with AsyncGuard(async_store) as guard:
            outcome = await guard.run("charge", "pay_7f3a", charge)
        await async_store.aclose()
        return outcome

    outcome = asyncio.run(again())
    assert (outcome.value, outcome.replayed) == (4200, True)


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:///records.db", "{here}/records.db"),
        ("sqlite:///data/records.db?sync=normal", "{here}/data/records.db"),
        ("sqlite:////var/lib/records.db?busy_timeout=250ms&sync=full", "/var/lib/records.db"),
        ("sqlite:///with%20blank%3F.db", "{here}/with blank?.db"),
    ],
)
def test_a_url_names_a_file(url: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert open_store(url).path == file.format(here=tmp_path)
    assert open_async_store(url).sync.path == file.format(here=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_url_says_how_to_sync_and_how_long_to_wait(path: Path) -> None:
    store = open_store(f"sqlite:///{path}?sync=normal&busy_timeout=50ms")

    with closing(store):
        assert connections(store)[1].execute("PRAGMA synchronous").fetchall() == [(1,)]
        with writing_elsewhere(path), pytest.raises(StoreUnavailable, match=r"writing for 0\.05s"):
            store.claim(entry())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///:memory:", "use memory:"),
        ("sqlite:records.db", "write sqlite:///relative.db or sqlite:////absolute/path.db"),
        ("sqlite://records.db", "write sqlite:///relative.db"),
        ("sqlite:///records.db#1", "write sqlite:///relative.db"),
        ("sqlite:///", "has to name a file"),
        (
            "sqlite:///records.db?synk=full",
            "'synk' is not one of sync, busy_timeout, auto_schema, purge: did you mean 'sync'?",
        ),
        ("sqlite:///records.db?sync=ful", "sync='ful' is not one of 'full', 'normal': did you mean 'full'?"),
        ("sqlite:///records.db?busy_timeout=5", "busy_timeout='5' is not a duration"),
        ("sqlite:///records.db?busy_timeout=0s", "busy_timeout='0s' has to be more than zero"),
        ("sqlite:///records.db?busy_timeout=forever", "busy_timeout"),
        ("sqlite:///records.db?busy_timeout=2h", "busy_timeout='2h' is more than 1h"),
    ],
)
def test_a_wrong_url_says_what_to_write(url: str, says: str) -> None:
    for open_it in (open_store, open_async_store):
        with pytest.raises(UsageError) as refused:
            open_it(url)
        assert says in str(refused.value)


def test_records_in_memory_are_refused_by_the_constructor_too() -> None:
    with pytest.raises(UsageError, match="use memory:"):
        SqliteStore(":memory:")


def test_an_sqlite_that_is_too_old_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 22, 0))

    with pytest.raises(UsageError, match=r"needs 3\.24 or newer"):
        SqliteStore(path)
