"""The statements of each database: composed of one list of columns, and complete."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest
from msgspec.structs import replace

from onefold._model import Address, Claim, Ending, Entry, Record, State
from onefold.stores.mysql.dialect import MARIADB, MYSQL
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.postgres.statements import batch, usual
from onefold.stores.sql.dialect import Dialect, SqlRequest
from onefold.stores.sql.records import ADDRESS, COLUMNS, PLACEHOLDER, READ, WRITTEN, put
from onefold.stores.sqlite.dialect import SQLITE

DATABASES = [SQLITE, POSTGRES, MYSQL, MARIADB]

# What PostgreSQL's indexes need besides.
ADDED = {"PostgreSQL": {"due", "held"}}

# Those of PostgreSQL that write what its indexes need, in whatever way.
UPDATES = {
    **{name: getattr(POSTGRES, name) for name in ("replace", "renew", "end", "end_joined", "leave_open")},
    **{name: getattr(batch, name) for name in ("_EXTEND_ALL", "_EXTEND_WAITING", "_CLOSE_ALL")},
    "usual.END": usual.END,
}


def test_every_field_of_a_record_has_its_column() -> None:
    """In its order: a record is made of a row by position."""
    assert ("address", *READ) == Record.__struct_fields__


def test_every_field_of_an_entry_is_written() -> None:
    named = {name for value in WRITTEN.values() for name in PLACEHOLDER.findall(value)}

    assert named == set(Entry.__struct_fields__) - {"address"} | {"now", "revision"}


@pytest.mark.parametrize("sql", DATABASES, ids=lambda sql: sql.name)
def test_the_schema_has_the_columns_that_are_written(sql: Dialect) -> None:
    table = sql.versions[0][0].partition("(\n")[2]
    there = set(re.findall(r"^    `?([a-z_]+)`? [A-Za-z]", table, re.MULTILINE))
    later = [statement for version in sql.versions[1:] for statement in version]
    there |= {name for one in later for name in re.findall(r"ADD COLUMN (?:IF NOT EXISTS )?`?([a-z_]+)", one)}

    assert there == {*ADDRESS, *(column.name for column in COLUMNS), *ADDED.get(sql.name, set())}


@pytest.mark.parametrize("name", UPDATES)
def test_what_postgres_looks_up_records_by_is_never_left_behind(name: str) -> None:
    """A renewal that moved `expires` and not `due` would let a purge remove what is running."""
    assigned = set(re.findall(r"\b([a-z_]+) = ", UPDATES[name].partition(" SET ")[2]))

    assert "due" in assigned
    assert ("held" in assigned) is ("state" in assigned)


# What the short INSERTs write by themselves: a lease, if it is running.
USUAL = {"address", "fingerprint", "lease", "ttl", "token"}

OTHER: dict[str, Any] = {
    "state": State.HELD,
    "attempt": 2,
    "age": 1.0,
    "bypasses": 1,
    "notes": b"",
    "result": b"",
    "omitted": True,
    "remark": "x",
}


def first(flow: Generator[Any, Any, Any]) -> SqlRequest:
    request: SqlRequest = next(flow)
    return request


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE])
@pytest.mark.parametrize("field", sorted(set(Entry.__struct_fields__) - USUAL))
def test_what_the_short_inserts_of_postgres_do_not_write_goes_by_the_long_ones(field: str, state: State) -> None:
    plain = Entry(address=Address("", "charge", "pay_1"), token=b"t", state=state, lease=30.0)
    other = replace(plain, **{field: OTHER[field]})
    short = usual.INSERT_RUNNING if state is State.RUNNING else usual.INSERT_DONE

    assert first(POSTGRES.claim(plain)).statement == first(POSTGRES.claim_joined(plain)).statement == short
    assert first(POSTGRES.claim(other)).statement == POSTGRES.insert
    assert first(POSTGRES.claim_joined(other)).statement == POSTGRES.insert_new


@pytest.mark.parametrize("field", sorted(set(Ending.__struct_fields__) - {"ttl"}))
def test_an_ending_that_stores_something_goes_by_the_long_update(field: str) -> None:
    claim, plain = Claim(Address("", "charge", "pay_1"), b"t"), Ending(state=State.DONE, ttl=60.0)

    assert POSTGRES.closing(claim, plain).statement == usual.END
    assert POSTGRES.closing(claim, replace(plain, **{field: OTHER[field]})).statement == POSTGRES.end


def test_a_statement_without_the_place_that_is_to_be_put_is_refused() -> None:
    assert put("a = :key AND b = :now", lambda name: f"<{name}>") == "a = <key> AND b = <now>"
    with pytest.raises(ValueError, match="no placeholder"):
        put("SELECT 1::text", str)
