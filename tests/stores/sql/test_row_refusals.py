"""Tables whose rows cannot be the record, for whatever is in the way: nothing is committed, and the error says so.

An `InProgress` or a `StoreUnavailable` would be delivered again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onefold import TX, Guard, RecordColumn, UsageError
from tests.stores.postgres.tools import ended
from tests.stores.sql.endings import CREDIT, DRIVERS, Driver, Hand
from tests.stores.sqlalchemy.wallet import Ledger

RECORD = RecordColumn("requests", "number", result="answer")

INSERT = "INSERT INTO requests (number) VALUES ('{key}')"

# The handler's own statement, if it has one.
WRITES = {"INSERT": INSERT, "left to Onefold": ""}

FUNCTION = "CREATE FUNCTION of_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$"
TRIGGER = "CREATE TRIGGER one BEFORE {event} ON requests FOR EACH ROW EXECUTE FUNCTION of_trigger()"

TABLE = {
    "sqlite": "CREATE TABLE requests (number TEXT PRIMARY KEY, answer TEXT)",
    "postgres": "CREATE TABLE requests (number TEXT PRIMARY KEY, answer TEXT)",
    "mariadb": "CREATE TABLE requests (number VARCHAR(50) COLLATE utf8mb4_bin PRIMARY KEY, answer TEXT)",
}

KEPT_OUT = {
    "sqlite": ["CREATE TRIGGER one BEFORE INSERT ON requests BEGIN SELECT RAISE(IGNORE); END"],
    "postgres": [FUNCTION.format(body="RETURN NULL;"), TRIGGER.format(event="INSERT")],
}
KEY_CHANGED = {
    "postgres": [
        FUNCTION.format(body="NEW.number := upper(NEW.number); RETURN NEW;"),
        TRIGGER.format(event="INSERT"),
    ],
    "mariadb": ["CREATE TRIGGER one BEFORE INSERT ON requests FOR EACH ROW SET NEW.number = UPPER(NEW.number)"],
}
NOT_CHANGED = {
    "sqlite": ["CREATE TRIGGER one BEFORE UPDATE ON requests BEGIN SELECT RAISE(IGNORE); END"],
    "postgres": [FUNCTION.format(body="RETURN NULL;"), TRIGGER.format(event="UPDATE")],
}
GENERATED = {
    "postgres": "CREATE TABLE requests (number TEXT PRIMARY KEY, answer TEXT GENERATED ALWAYS AS ('x') STORED)",
    "mariadb": "CREATE TABLE requests (number VARCHAR(50) COLLATE utf8mb4_bin PRIMARY KEY, "
    "answer TEXT GENERATED ALWAYS AS ('x') STORED)",
}


@pytest.fixture(
    params=[one for one in DRIVERS if one.name in ("sqlite3", "psycopg", "pymysql")], ids=lambda one: one.name
)
def driver(request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.param
    return found


@pytest.fixture
def guard(driver: Driver, ledger: Ledger) -> Iterator[Guard]:
    url = f"sqlite:///{ledger.address}" if driver.database == "sqlite" else ledger.address
    with Guard(url) as guard:
        yield guard


def handler(guard: Guard, write: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return a handler with a statement of its own, and the list of its runs."""
    runs: list[str] = []

    @guard.transactional("pay", key="key", record=RECORD, fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> str:
        runs.append(key)
        if write:
            ended(Hand(tx).sql(write.format(key=key)))
        ended(Hand(tx).sql(CREDIT))
        return "paid"

    return pay, runs


def create(ledger: Ledger, made: dict[str, list[str]]) -> None:
    if ledger.database not in made:
        pytest.skip("its triggers cannot do that")
    for statement in (TABLE[ledger.database], *made[ledger.database]):
        ledger.execute(statement)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("made", [KEPT_OUT, KEY_CHANGED], ids=["kept out", "key changed"])
def test_a_row_that_a_trigger_keeps_out_is_not_taken_for_another_deliverys(
    guard: Guard, ledger: Ledger, made: dict[str, list[str]], write: str
) -> None:
    create(ledger, made)
    pay, runs = handler(guard, write)

    with pytest.raises(UsageError, match=r"it did not .*a trigger or a policy keeps it out, or changes it"):
        pay("k1")

    assert (runs, ledger.balance, ledger.rows("SELECT * FROM requests")) == (["k1"], 0, [])


def test_a_row_in_which_a_trigger_keeps_no_result_is_refused(guard: Guard, ledger: Ledger) -> None:
    """Otherwise a duplicate would get none, and another payload would go unnoticed."""
    create(ledger, NOT_CHANGED)
    pay, runs = handler(guard, INSERT)

    with pytest.raises(UsageError, match=r"requests does not take what has to be written into answer .*trigger"):
        pay("k1")

    assert (runs, ledger.balance, ledger.rows("SELECT * FROM requests")) == (["k1"], 0, [])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_result_that_the_database_generates_is_refused(guard: Guard, ledger: Ledger, write: str) -> None:
    if ledger.database not in GENERATED:
        pytest.skip("SQLite does not list such a column: it is refused as missing")
    ledger.execute(GENERATED[ledger.database])
    pay, runs = handler(guard, write)

    with pytest.raises(UsageError, match=r"requests does not take what has to be written into .*answer"):
        pay("k1")

    assert (runs, ledger.balance) == (["k1"], 0)


def test_a_row_that_is_already_in_a_table_below_is_ours(guard: Guard, ledger: Ledger) -> None:
    """Partitions as they were made before PostgreSQL had them: a trigger writes the row, and the INSERT does not."""
    if ledger.database != "postgres":
        pytest.skip("only PostgreSQL has them")
    ledger.execute(TABLE["postgres"])
    ledger.execute("CREATE TABLE requests_new (PRIMARY KEY (number)) INHERITS (requests)")
    ledger.execute(FUNCTION.format(body="INSERT INTO requests_new VALUES (NEW.*); RETURN NULL;"))
    ledger.execute(TRIGGER.format(event="INSERT"))
    pay, runs = handler(guard, "")

    assert [pay("k1"), pay("k1")] == ["paid", "paid"]
    assert (runs, ledger.balance) == (["k1"], 10)


def test_a_deferrable_constraint_is_for_handlers_that_write_their_row(guard: Guard, ledger: Ledger) -> None:
    if ledger.database != "postgres":
        pytest.skip("only PostgreSQL has them")
    ledger.execute("CREATE TABLE requests (number TEXT, answer TEXT, UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(UsageError, match="nor a DEFERRABLE constraint, unless the handler writes the row"):
        handler(guard, "")[0]("k1")
    pay, runs = handler(guard, INSERT)

    assert [pay("k1"), pay("k1")] == ["paid", "paid"]
    assert (runs, ledger.balance) == (["k1"], 10)


def test_a_deferrable_constraint_does_not_hide_the_row_of_a_stranger(guard: Guard, ledger: Ledger) -> None:
    """Until it is checked, at COMMIT, the table has two rows of the key."""
    if ledger.database != "postgres":
        pytest.skip("only PostgreSQL has them")
    ledger.execute("CREATE TABLE requests (number TEXT, answer TEXT, UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)")

    @guard.transactional("pay", key="key", record=RECORD, fingerprint=None)
    def pay(key: str, *, tx: Any = TX) -> None:
        ledger.execute(INSERT.format(key=key))
        ended(Hand(tx).sql(INSERT.format(key=key)))
        ended(Hand(tx).sql(CREDIT))

    assert pay.outcome("k1").replayed
    assert ledger.balance == 0


@pytest.mark.parametrize("engine", ["MyISAM", "Aria", "MEMORY"])
def test_a_table_without_transactions_is_refused_before_anything_runs(
    guard: Guard, ledger: Ledger, engine: str
) -> None:
    """The row of a handler that fails would stay, and its next delivery be answered as done."""
    if ledger.database != "mariadb":
        pytest.skip("every table has them")
    ledger.execute(
        "CREATE TABLE requests (number VARCHAR(50) COLLATE utf8mb4_bin PRIMARY KEY, answer VARCHAR(200)) "
        f"ENGINE = {engine}"
    )
    pay, runs = handler(guard, INSERT)

    with pytest.raises(UsageError, match=r"the engine of requests has no transactions.*Use InnoDB"):
        pay("k1")

    assert (runs, ledger.rows("SELECT * FROM requests")) == ([], [])


def test_an_index_on_the_first_characters_is_no_unique_index_on_the_key(guard: Guard, ledger: Ledger) -> None:
    if ledger.database != "mariadb":
        pytest.skip("only MySQL and MariaDB have them")
    ledger.execute("CREATE TABLE requests (number VARCHAR(50) COLLATE utf8mb4_bin, answer TEXT, UNIQUE (number(2)))")
    pay, runs = handler(guard, INSERT)

    with pytest.raises(UsageError, match="requests has no unique index on number"):
        pay("k1")
    assert runs == []


def test_a_key_that_the_columns_character_set_does_not_have_is_refused(guard: Guard, ledger: Ledger) -> None:
    if ledger.database != "mariadb":
        pytest.skip("the others have one character set")
    ledger.execute(
        "CREATE TABLE requests (number VARCHAR(50) PRIMARY KEY, answer TEXT) CHARSET latin1 COLLATE latin1_bin"
    )
    pay, runs = handler(guard, INSERT)

    with pytest.raises(UsageError, match=r"no value of requests\.number \(varchar\(50\) COLLATE latin1_bin\)"):
        pay("日本")
    assert runs == []
