"""Who owns the tables of `?partitions=`, who may read them, and where they are: a sealing changes none of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from onefold import Guard
from onefold.stores.schema import apply
from tests.stores.postgres.partitions.tools import expire, guard_on, partitioned, seal, sealed
from tests.stores.postgres.tools import another, rows


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """A role that may log in and create tables, for this test alone: roles belong to the server."""
    name = f"onefold_{secrets.token_hex(4)}"
    with another(postgres_url) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'app'".encode())
        connection.execute(f"GRANT USAGE, CREATE ON SCHEMA public TO {name}".encode())
    yield name
    with another(postgres_url) as connection:
        connection.execute(f"DROP OWNED BY {name} CASCADE".encode())
        connection.execute(f"DROP ROLE {name}".encode())


def url_of(role: str, url: str) -> str:
    return f"postgresql://{role}:app@{url.partition('@')[2]}"


def test_an_owner_purges_tables_that_an_administrator_has_partitioned(postgres_url: str, role: str) -> None:
    theirs = url_of(role, postgres_url)
    with Guard(theirs) as plain:
        plain.run("charge", "k", lambda: 1)
    apply(partitioned(postgres_url))

    assert seal(theirs)

    with guard_on(theirs) as guard:
        assert guard.run("charge", "k", lambda: 2).replayed
        expire(postgres_url)
        assert guard.store.purge(10) == 1
    assert sealed(postgres_url) == []
    owners = "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relname ~ '^onefold_rec'"
    assert rows(postgres_url, owners) == [(role,)]


def test_nobody_may_read_more_than_before(postgres_url: str, role: str) -> None:
    """Default privileges are for new tables, and a partition is one, although it takes the place of another."""
    with guard_on(postgres_url) as guard:
        guard.run("charge", "j", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute("DROP TABLE onefold_records CASCADE")
        connection.execute(f"ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO {role}".encode())
        connection.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO PUBLIC")
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute(f"REVOKE ALL ON onefold_records FROM {role}, PUBLIC".encode())
    with guard_on(postgres_url) as guard:
        guard.run("charge", "l", lambda: 1)
    assert seal(postgres_url)

    readable = rows(
        postgres_url,
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^onefold_records' "
        f"AND has_table_privilege('{role}', oid, 'SELECT')",
    )

    assert readable == []


def test_grants_on_columns_survive_a_sealing(postgres_url: str, role: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute(f"GRANT SELECT (operation, state) ON onefold_records TO {role}".encode())
        connection.execute(f"GRANT UPDATE (remark) ON onefold_records TO {role} WITH GRANT OPTION".encode())
    granted = (
        "SELECT attname, attacl::text FROM pg_attribute WHERE attrelid = 'onefold_records'::regclass "
        "AND attacl IS NOT NULL ORDER BY 1"
    )
    before = rows(postgres_url, granted)

    assert seal(postgres_url)

    assert rows(postgres_url, granted) == before
    assert len(before) == 3
    assert rows(url_of(role, postgres_url), "SELECT operation, state FROM onefold_records") == [("charge", "done")]


@pytest.fixture
def tablespace(postgres_url: str) -> Iterator[str]:
    name = f"onefold_{secrets.token_hex(4)}"
    with another(postgres_url) as connection:
        connection.execute("SET allow_in_place_tablespaces = on")
        connection.execute(f"CREATE TABLESPACE {name} LOCATION ''".encode())
    yield name
    with another(postgres_url) as connection:
        connection.execute("DROP TABLE IF EXISTS onefold_records CASCADE")
        connection.execute(f"DROP TABLESPACE {name}".encode())


@pytest.mark.more
def test_tables_and_indexes_stay_in_their_tablespaces(postgres_url: str, tablespace: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute(f"ALTER TABLE onefold_records SET TABLESPACE {tablespace}".encode())
        connection.execute(f"ALTER INDEX onefold_records_due SET TABLESPACE {tablespace}".encode())
    places = (
        "SELECT relname, spcname FROM pg_class LEFT JOIN pg_tablespace ON pg_tablespace.oid = reltablespace "
        "WHERE relname IN ('onefold_records', 'onefold_records_due', 'onefold_records_held') ORDER BY 1"
    )

    assert seal(postgres_url)

    assert rows(postgres_url, places) == [
        ("onefold_records", tablespace),
        ("onefold_records_due", tablespace),
        ("onefold_records_held", None),
    ]


def test_indexes_with_long_and_similar_names_survive_sealings(postgres_url: str) -> None:
    mine = [f"{start}{'é' * 20}_{number}" for start in ("onefold_records_", "mine_") for number in (1, 2)]
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
        with another(postgres_url) as connection:
            for name in mine:
                connection.execute(f'CREATE INDEX "{name}" ON onefold_records (remark)'.encode())
        for key in "ab":
            assert seal(postgres_url)
            guard.run("charge", key, lambda: 1)

    names = "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'onefold_records'::regclass"
    assert {f'"{name}"' for name in mine} < {f'"{name.strip(chr(34))}"' for (name,) in rows(postgres_url, names)}
    assert len(sealed(postgres_url)) == 2
