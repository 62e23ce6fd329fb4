"""`RecordColumn` on MariaDB, interleaved step by step: whoever waits for another delivery is answered from its row.

Each time the credits are counted by somebody who knows nothing of Onefold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pymysql
import pytest

from onefold import Guard, InProgress, RecordColumn, UsageError
from tests.stores.mysql.wallet import parameters
from tests.stores.sqlalchemy.wallet import Ledger, somebody_waits
from tests.support import PATIENCE
from tests.wallet import never_opened

PAYMENT = RecordColumn("payments", "idempotency_key")

LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")

INSERT = "INSERT INTO payments VALUES (%s, '', 500)"
WRITES = {
    "INSERT": INSERT,
    "IGNORE": INSERT.replace("INSERT", "INSERT IGNORE"),
    "DUPLICATE KEY": f"{INSERT} ON DUPLICATE KEY UPDATE amount = 500",
    "REPLACE": INSERT.replace("INSERT", "REPLACE"),
}

# Where a read keeps nobody from writing.
SNAPSHOTS = LEVELS[:3]

# Every day the pairs that were once wrong.
EVERY_DAY = {
    ("READ COMMITTED", "IGNORE"),
    ("REPEATABLE READ", "DUPLICATE KEY"),
}


def each(*levels: str) -> pytest.MarkDecorator:
    """Each way to write a row at each of these levels."""
    return pytest.mark.parametrize(
        ("level", "write"),
        [
            pytest.param(level, write, marks=() if (level, write) in EVERY_DAY else pytest.mark.more)
            for level in levels
            for write in WRITES
        ],
    )


# More than a connection could once mark.
KEYS = 65

Connect = Callable[[], Any]


@pytest.fixture
def ledger(mysql_url: str) -> Iterator[Ledger]:
    with (
        closing(Ledger("mariadb", mysql_url)) as ledger,
        closing(pymysql.connect(**parameters(mysql_url))) as connection,
    ):
        # Onefold's tables exist before, as everywhere but at the very first delivery.
        deliver_row(connection, "earlier")
        connection.rollback()
        yield ledger


@pytest.fixture
def connect(mysql_url: str, level: str) -> Iterator[Connect]:
    opened: list[Any] = []

    def connect() -> Any:
        connection = pymysql.connect(**parameters(mysql_url))
        connection.query(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        if connection.open:
            connection.close()


def deliver(connection: Any, write: str, key: str = "k1") -> bool:
    """Whether it was replayed. The caller ends the transaction."""

    def pay() -> None:
        with connection.cursor() as cursor:
            cursor.execute(WRITES[write], (key,))
            cursor.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")

    return Guard(never_opened).within(connection, record=PAYMENT).run("pay", key, pay).replayed


def check_waiting(ledger: Ledger, first: Any, second: Any, write: str) -> None:
    """The second delivery comes while the first one is not committed yet, and is answered from its row."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(deliver, second, write)
        somebody_waits(ledger)
        first.commit()
        replayed = waiting.result(PATIENCE)
    second.commit()

    assert replayed
    assert ledger.balance == 10


@each(*LEVELS)
def test_a_delivery_that_was_rolled_back_on_this_connection_hides_no_row_of_another(
    ledger: Ledger, connect: Connect, write: str
) -> None:
    one, other = connect(), connect()
    deliver(one, write)
    one.rollback()
    deliver(other, write)

    check_waiting(ledger, other, one, write)


@pytest.mark.parametrize("level", LEVELS[2:3])
@pytest.mark.parametrize("write", ["DUPLICATE KEY"])
def test_of_many_keys_in_one_transaction_none_is_let_go_before_its_end(
    ledger: Ledger, connect: Connect, write: str
) -> None:
    one, other = connect(), connect()
    for number in range(KEYS):
        deliver(one, write, f"k{number}")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: [deliver(other, write, f"k{number}") for number in range(KEYS)])
        somebody_waits(ledger)
        one.commit()
        replayed = waiting.result(PATIENCE)
    other.commit()

    assert replayed == [True] * KEYS
    assert ledger.balance == 10 * KEYS


@each(*SNAPSHOTS)
def test_a_row_that_was_committed_behind_an_old_snapshot_is_found(ledger: Ledger, connect: Connect, write: str) -> None:
    one, other = connect(), connect()
    with one.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM payments")
    deliver(other, write)
    other.commit()
    other.close()

    replayed = deliver(one, write)
    one.commit()

    assert replayed
    assert ledger.balance == 10


@each(*SNAPSHOTS)
def test_a_row_whose_handler_failed_and_whose_caller_committed_is_found_behind_an_old_snapshot(
    ledger: Ledger, connect: Connect, write: str
) -> None:
    """The caller has caught the error, and has committed what the handler did before it."""
    one, other = connect(), connect()

    def failing() -> None:
        with other.cursor() as cursor:
            cursor.execute(WRITES[write], ("k1",))
            cursor.execute("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
        raise ValueError("after all")

    with one.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM payments")
    with pytest.raises(ValueError, match="after all"):
        Guard(never_opened).within(other, record=PAYMENT).run("pay", "k1", failing)

    check_waiting(ledger, other, one, write)


@pytest.mark.parametrize("level", LEVELS[2:3])
def test_a_handler_that_ended_the_transaction_keeps_nobody_out(ledger: Ledger, connect: Connect) -> None:
    one, other = connect(), connect()
    with pytest.raises(UsageError, match="ended the transaction"):
        Guard(never_opened).within(one, record=PAYMENT).run("pay", "k1", one.rollback)
    one.rollback()

    # Its connection is open still, as in a pool.
    replayed = deliver(other, "INSERT")
    other.commit()

    assert not replayed
    assert ledger.balance == 10


@pytest.mark.parametrize("level", LEVELS[2:3])
def test_a_delivery_that_has_waited_for_too_long_is_told_to_come_again(ledger: Ledger, connect: Connect) -> None:
    one, other = connect(), connect()
    other.query("SET innodb_lock_wait_timeout = 1")
    deliver(one, "INSERT")

    with pytest.raises(InProgress):
        deliver(other, "INSERT")
    other.rollback()
    one.commit()

    assert deliver(other, "INSERT")
    assert ledger.balance == 10


@each(*LEVELS[1:3])
def test_a_row_that_was_deleted_since_is_written_anew(ledger: Ledger, connect: Connect, write: str) -> None:
    """Only the row says what is done, and not the record of ours beside it."""
    one = connect()
    deliver(one, write)
    one.commit()
    ledger.execute("DELETE FROM payments")

    assert not deliver(one, write)
    one.commit()
    assert deliver(one, write)
    one.commit()

    assert ledger.balance == 20


@pytest.mark.parametrize("level", LEVELS[2:3])
def test_two_operations_with_one_column_wait_for_each_other(ledger: Ledger, connect: Connect) -> None:
    one, other = connect(), connect()
    deliver(one, "IGNORE")

    def refund() -> bool:
        record = RecordColumn("PAYMENTS".lower(), "Idempotency_Key")
        run = Guard(never_opened).within(other, record=record).run
        return run("refund", "k1", lambda: other.query(WRITES["IGNORE"] % "'k1'")).replayed

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(refund)
        somebody_waits(ledger)
        one.commit()

        assert waiting.result(PATIENCE)


@pytest.mark.parametrize("level", LEVELS[2:3])
def test_neighbours_do_not_wait_for_each_other(ledger: Ledger, connect: Connect) -> None:
    """Each has a key that would come right after the other's."""
    callers = [connect() for _ in range(4)]
    for number, caller in enumerate(callers):
        deliver_row(caller, f"order-{number}")
    for caller in reversed(callers):
        caller.commit()

    assert len(ledger.rows("SELECT * FROM payments")) == 4


def deliver_row(connection: Any, key: str) -> None:
    run = Guard(never_opened).within(connection, record=PAYMENT).run
    assert not run("pay", key, lambda: connection.query(INSERT % f"'{key}'")).replayed


@pytest.mark.parametrize("level", LEVELS[2:3])
def test_a_handler_may_use_another_database(ledger: Ledger, connect: Connect) -> None:
    one = connect()

    def pay() -> None:
        one.query(INSERT % "'k1'")
        one.query("USE information_schema")

    assert not Guard(never_opened).within(one, record=PAYMENT).run("pay", "k1", pay).replayed
    one.commit()
    assert len(ledger.rows("SELECT * FROM payments")) == 1


@pytest.mark.parametrize(
    ("level", "write"), [("READ COMMITTED", "INSERT"), ("REPEATABLE READ", "INSERT"), ("REPEATABLE READ", "IGNORE")]
)
def test_a_row_that_a_stranger_has_committed_meanwhile_is_not_the_handlers(
    ledger: Ledger, connect: Connect, write: str
) -> None:
    one = connect()

    def handler() -> None:
        one.query("UPDATE wallet SET balance = balance + 10 WHERE account = 'asha'")
        ledger.execute("INSERT INTO payments VALUES ('k1', '', 1)")
        one.query(WRITES[write] % "'k1'")

    with pytest.raises((InProgress, pymysql.IntegrityError)):
        Guard(never_opened).within(one, record=PAYMENT).run("pay", "k1", handler)
    one.rollback()

    assert deliver(one, write)
    assert ledger.balance == 0
