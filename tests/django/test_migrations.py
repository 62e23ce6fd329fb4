"""The Django app: its migrations make the tables that the store would make, on each database."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

pytest.importorskip("django")

from django.core.management import call_command

from onefold import Guard, StoreUnavailable
from onefold.stores import schema
from onefold.stores.sql.records import VERSION
from tests.stores.django.project import alias_of, ledger_at, project
from tests.stores.sqlalchemy.wallet import Ledger
from tests.support import Handler

TABLES = {"onefold_records", "onefold_schema"}


@pytest.fixture(scope="module", autouse=True)
def _project() -> Iterator[None]:
    with project():
        yield


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = ledger_at(request, request.param)
    yield ledger
    ledger.close()


@pytest.fixture
def alias(ledger: Ledger) -> Iterator[str]:
    with alias_of(ledger.database, ledger.address) as alias:
        yield alias


def migrate(alias: str, *target: str) -> None:
    call_command("migrate", "onefold", *target, database=alias, verbosity=0)


def version(ledger: Ledger) -> int:
    return int(ledger.rows("SELECT version FROM onefold_schema")[0][0])


def test_the_migrations_make_what_the_store_wants_and_there_is_nothing_left_to_make(alias: str, ledger: Ledger) -> None:
    with Guard(f"django://{alias}?auto_schema=no") as guard:
        with pytest.raises(StoreUnavailable, match="onefold schema"):
            guard.run("charge", "c1", Handler())
        migrate(alias)

        assert guard.run("charge", "c1", Handler("paid")).value == "paid"
    assert version(ledger) == VERSION


def test_each_version_has_a_migration(alias: str, ledger: Ledger) -> None:
    migrate(alias, "0001")
    first = version(ledger)
    with Guard(f"django://{alias}?auto_schema=no") as guard:
        guard.run("charge", "c1", Handler("paid"))
    migrate(alias, "0002")

    assert (first, version(ledger)) == (1, 2)
    assert ledger.records == ["c1"]


def test_tables_that_the_store_has_made_are_found(alias: str, ledger: Ledger) -> None:
    with Guard(f"django://{alias}") as guard:
        guard.run("charge", "c1", Handler("paid"))

    migrate(alias)

    assert ledger.records == ["c1"]


def test_going_back_to_the_version_before_keeps_the_records_and_going_back_to_zero_drops_them(
    alias: str, ledger: Ledger
) -> None:
    migrate(alias)
    with Guard(f"django://{alias}") as guard:
        guard.run("charge", "c1", Handler("paid"))

    migrate(alias, "0001")
    kept = ledger.records
    migrate(alias, "zero")

    assert kept == ["c1"]
    assert not TABLES & ledger.tables()


def test_the_statements_can_be_read_before(alias: str) -> None:
    written = io.StringIO()

    call_command("sqlmigrate", "onefold", "0001", database=alias, stdout=written)

    assert "CREATE TABLE IF NOT EXISTS onefold_records" in written.getvalue()


def test_django_finds_nothing_to_migrate_in_the_app(alias: str) -> None:
    call_command("makemigrations", "onefold", check=True, dry_run=True, verbosity=0)


def test_the_command_for_tables_knows_django(alias: str, ledger: Ledger) -> None:
    described = schema.describe(f"django://{alias}")
    applied = schema.apply(f"django://{alias}")

    assert described is not None
    assert "CREATE TABLE IF NOT EXISTS onefold_records" in described
    assert applied == [f"django://{alias}: Onefold's tables exist, version {VERSION}"]
    assert ledger.tables() >= TABLES
