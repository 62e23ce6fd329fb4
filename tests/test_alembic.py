"""`op.create_onefold_tables()` in a real migration: on each database, offline, and beside autogenerate."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("alembic")

from alembic import command
from alembic.config import Config

from onefold import Guard
from onefold.stores.sql.records import VERSION
from onefold.stores.sqlalchemy import SqlAlchemyStore
from tests.stores.postgres.partitions.tools import guard_on, seal
from tests.stores.sqlalchemy.wallet import DATABASES, Ledger
from tests.support import Handler

ENV = """
from alembic import context
from sqlalchemy import MetaData, create_engine

import onefold.alembic

options = dict(target_metadata=MetaData(), include_name=onefold.alembic.include_name)

if context.is_offline_mode():
    context.configure(url=context.config.get_main_option("sqlalchemy.url"), **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
    connection.engine.dispose()
"""

MIGRATION = """
import onefold.alembic
from alembic import op

revision = "0001"
down_revision = None


def upgrade():
    op.create_onefold_tables()


def downgrade():
    op.drop_onefold_tables()
"""

SCRIPT = '''
"""${message}"""
from alembic import op
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = Ledger(request.param, str(request.getfixturevalue(DATABASES[request.param][0])))
    yield ledger
    ledger.close()


@pytest.fixture
def project(ledger: Ledger, tmp_path: Path) -> Config:
    """An Alembic project with one migration, which makes our tables."""
    scripts = tmp_path / "alembic"
    (scripts / "versions").mkdir(parents=True)
    (scripts / "env.py").write_text(ENV)
    (scripts / "script.py.mako").write_text(SCRIPT)
    (scripts / "versions" / "0001_onefold.py").write_text(MIGRATION)
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", ledger.url(DATABASES[ledger.database][1]).replace("%", "%%"))
    return config


def used(ledger: Ledger) -> str:
    """What a store without the right to make tables does with those that are there."""
    engine = ledger.engine()
    with Guard(SqlAlchemyStore(engine, auto_schema=False)) as guard:
        value: str = guard.run("charge", "c1", Handler("paid")).value
    engine.dispose()
    return value


def test_a_migration_makes_the_tables_and_takes_them_away(project: Config, ledger: Ledger) -> None:
    command.upgrade(project, "head")
    value = used(ledger)
    command.downgrade(project, "base")

    assert value == "paid"
    assert not {"onefold_records", "onefold_schema"} & ledger.tables()


def test_tables_that_are_there_already_stay_and_are_brought_forward(project: Config, ledger: Ledger) -> None:
    command.upgrade(project, "head")
    assert used(ledger) == "paid"
    ledger.execute("UPDATE onefold_schema SET version = 1")
    ledger.execute("DELETE FROM alembic_version")

    command.upgrade(project, "head")

    assert ledger.rows("SELECT version FROM onefold_schema") == [(VERSION,)]
    assert ledger.records == ["c1"]


def test_offline_the_statements_are_written_down_and_work(project: Config, ledger: Ledger) -> None:
    written = io.StringIO()
    project.output_buffer = written
    with redirect_stdout(written):
        command.upgrade(project, "head", sql=True)
    script = written.getvalue()

    assert "CREATE TABLE IF NOT EXISTS onefold_records" in script
    assert "onefold_records" not in ledger.tables()

    for statement in script.split(";\n"):
        if statement.strip() and "BEGIN" not in statement and "COMMIT" not in statement:
            ledger.execute(statement.replace(":", r"\:"))
    assert used(ledger) == "paid"


def test_autogenerate_leaves_the_tables_alone(project: Config, ledger: Ledger) -> None:
    command.upgrade(project, "head")

    made = command.revision(project, "more", autogenerate=True)

    assert made is not None
    text_of = Path(str(made.path)).read_text()  # type: ignore[union-attr]
    assert "drop_table('wallet')" in text_of
    assert "onefold" not in text_of


@pytest.mark.parametrize("ledger", ["postgres"], indirect=True)
def test_autogenerate_leaves_partitions_alone(project: Config, ledger: Ledger, postgres_url: str) -> None:
    """They hold live records."""
    command.upgrade(project, "head")
    with guard_on(postgres_url) as guard:
        guard.run("charge", "c1", Handler("paid"))
    assert seal(postgres_url)

    made = command.revision(project, "more", autogenerate=True)

    assert made is not None
    text_of = Path(str(made.path)).read_text()  # type: ignore[union-attr]
    assert "drop_table('wallet')" in text_of
    assert "onefold" not in text_of
