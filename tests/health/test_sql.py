"""The doctor on SQL stores: each check is green where all is well, and turns on a database that was made bad."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pymysql
import pytest
from sqlalchemy import create_engine

from onefold import Guard
from onefold.health import Check
from onefold.stores.base import Query
from services import postgres as postgres_server
from services.house import House
from services.servers import Server
from tests.health.tools import GREEN, RED, UNKNOWN, YELLOW, checks_of, grades_of, left_behind, report_of, use
from tests.stores.postgres.tools import rows, tables
from tests.stores.sql.versions import TOO_NEW
from tests.support import eventually

NOBODY = 65_534


def run(url: str, *statements: str) -> None:
    """Statements of somebody else's, in PostgreSQL or MySQL."""
    if url.startswith("postgresql"):
        with postgres_server.connected(url) as connection:
            for statement in statements:
                connection.execute(statement)
        return
    parts = urlsplit(url)
    with pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 3306,
        user=parts.username or "",
        password=(parts.password or "").encode(),
        database=parts.path[1:],
        autocommit=True,
    ) as connection:
        for statement in statements:
            connection.cursor().execute(statement)


@pytest.fixture(params=["postgres", "mysql", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/onefold.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def test_a_database_that_is_run_well_is_green(url: str) -> None:
    use(url)

    found = checks_of(url)

    assert {name: check for name, check in found.items() if check.grade is not GREEN} == {}
    assert {"tables", "indexes", "purge", "trial", "round trip", "clock"} < set(found)
    assert left_behind(url) == 0


def test_missing_tables_are_yellow_or_red_and_are_not_made(url: str) -> None:
    ours, by_hand = checks_of(url), checks_of(f"{url}?auto_schema=no")

    assert (ours["tables"].grade, by_hand["tables"].grade) == (YELLOW, RED)
    assert "onefold schema" in ours["tables"].fix
    assert ours["trial"].grade is UNKNOWN
    # Nor by the second look.
    assert checks_of(url)["tables"].reason == ours["tables"].reason


def test_tables_of_the_version_before_are_yellow_and_stay_as_they_are(postgres_url: str, mysql_url: str) -> None:
    for url in (postgres_url, mysql_url):
        use(url)
        run(url, "UPDATE onefold_schema SET version = 1")

        first, second = checks_of(url), checks_of(url)

        assert first["tables"].grade is second["tables"].grade is YELLOW
        assert "version 1" in second["tables"].reason
        assert first["trial"].grade is UNKNOWN
        # Whoever makes the tables by hand works on the old form meanwhile.
        assert grades_of(f"{url}?auto_schema=no")["trial"] is GREEN


def test_tables_of_a_version_that_is_too_new_are_red(postgres_url: str) -> None:
    use(postgres_url)
    run(postgres_url, TOO_NEW)

    found = checks_of(postgres_url)

    assert (found["tables"].grade, found["tables"].fix) == (RED, "Upgrade Onefold")
    assert found["trial"].grade is RED


def test_a_dropped_index_is_yellow(postgres_url: str, mysql_url: str, tmp_path: Path) -> None:
    lite = f"sqlite:///{tmp_path}/onefold.db"
    for url in (postgres_url, mysql_url, lite):
        use(url)
    run(postgres_url, "DROP INDEX onefold_records_due")
    run(mysql_url, "ALTER TABLE onefold_records DROP INDEX onefold_records_expires")
    _in_file(tmp_path, "DROP INDEX onefold_records_expires")

    for url in (postgres_url, mysql_url, lite):
        found = checks_of(url)
        assert found["indexes"].grade is YELLOW
        assert "whole table" in found["indexes"].reason
        assert found["purge"].grade is UNKNOWN


def test_expired_records_are_yellow_after_an_hour(postgres_url: str, mysql_url: str, tmp_path: Path) -> None:
    lite = f"sqlite:///{tmp_path}/onefold.db"
    for url in (postgres_url, mysql_url, lite):
        use(url)
    for age, grade in ((900, GREEN), (7_200, YELLOW)):
        then = time.time() - age
        run(postgres_url, f"UPDATE onefold_records SET expires = {then}, due = {int(then // 600)}")
        run(mysql_url, f"UPDATE onefold_records SET expires = {then}")
        _in_file(tmp_path, f"UPDATE onefold_records SET expires = {then}")

        for url in (postgres_url, mysql_url, lite):
            found = checks_of(url)["purge"]
            assert found.grade is grade, (url, found)
            assert "expired: 1 record, the oldest by" in found.reason


def test_a_user_who_may_only_read_is_red_in_the_trial(postgres_url: str, mysql_url: str) -> None:
    for url in (postgres_url, mysql_url):
        use(url)
    run(
        postgres_url,
        "DROP ROLE IF EXISTS onefold_reader",
        "CREATE ROLE onefold_reader LOGIN PASSWORD 'readsecret'",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO onefold_reader",
        "GRANT USAGE ON SCHEMA public TO onefold_reader",
    )
    name = urlsplit(mysql_url).path[1:]
    run(
        mysql_url,
        "CREATE OR REPLACE USER onefold_reader IDENTIFIED BY 'readsecret'",
        f"GRANT SELECT ON {name}.* TO onefold_reader",
    )

    for url in (postgres_url, mysql_url):
        host = urlsplit(url).netloc.rpartition("@")[2]
        reader = urlsplit(url)._replace(netloc=f"onefold_reader:readsecret@{host}").geturl()
        found = checks_of(reader)
        assert found["trial"].grade is RED
        assert "readsecret" not in str(found)
        assert found["tables"].grade is GREEN
    run(postgres_url, "DROP OWNED BY onefold_reader", "DROP ROLE onefold_reader")
    run(mysql_url, "DROP USER onefold_reader")
    # InnoDB's numbers are for those with PROCESS.
    assert found["dead rows"].grade is UNKNOWN


# PostgreSQL.


def set_for_session(url: str, **settings: str) -> str:
    """The URL of a session with these settings, as `PGOPTIONS` would have them."""
    options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items())
    return f"{url}?options={quote(options)}"


def test_asynchronous_commits_are_red(postgres_url: str) -> None:
    use(postgres_url)

    found = checks_of(set_for_session(postgres_url, synchronous_commit="off"))["durability"]

    assert found.grade is RED
    assert "synchronous_commit is off" in found.reason


def test_local_commits_beside_synchronous_standbys_are_yellow(own_postgres: Server) -> None:
    run(own_postgres.url, "ALTER SYSTEM SET synchronous_standby_names = 'other'", "SELECT pg_reload_conf()")
    # It is told to read them again, and not waited for.
    assert eventually(lambda: rows(own_postgres.url, "SHOW synchronous_standby_names") == [("other",)])
    url = set_for_session(own_postgres.url, synchronous_commit="local")
    use(url)

    assert checks_of(url)["durability"].grade is YELLOW


@pytest.fixture
def waiting_postgres(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A primary whose commits wait for a standby that is not there."""
    for name, value in {"wal_level": "replica", "max_wal_senders": "2"}.items():
        monkeypatch.setitem(postgres_server.SETTINGS, name, value)
    with house.own("postgres") as server:
        use(server.url)
        run(server.url, "ALTER SYSTEM SET synchronous_standby_names = 'other'", "SELECT pg_reload_conf()")
        assert eventually(lambda: rows(server.url, "SHOW synchronous_standby_names") == [("other",)])
        yield server


def test_commits_that_wait_for_a_standby_that_is_not_there_are_red_and_none_is_tried(waiting_postgres: Server) -> None:
    found = checks_of(waiting_postgres.url)

    assert found["replication"].grade is RED
    assert found["replication"].reason.endswith("every commit waits")
    assert found["trial"].reason == "not tried: its commit would wait for ever"


def test_read_only_transactions_are_red(postgres_url: str) -> None:
    use(postgres_url)

    found = checks_of(set_for_session(postgres_url, default_transaction_read_only="on"))

    assert found["role"].grade is RED
    assert found["trial"].grade is RED


def test_the_isolation_level_is_told(postgres_url: str) -> None:
    use(postgres_url)

    found = checks_of(set_for_session(postgres_url, default_transaction_isolation="serializable"))["isolation"]

    assert (found.grade, found.reason.partition(":")[0]) == (GREEN, "serializable")


def test_a_standby_without_fsync_is_red_twice_and_is_not_written_to(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"fsync": "off", "wal_level": "replica", "max_wal_senders": "2"}
    for name, value in settings.items():
        monkeypatch.setitem(postgres_server.SETTINGS, name, value)
    with house.own("postgres") as server:
        use(server.url)
        signal = Path(server.daemons[0].folder) / "data" / "standby.signal"
        signal.touch()
        server.restart()

        found = checks_of(server.url)

    assert found["role"].grade is found["durability"].grade is RED
    assert "replica" in found["role"].reason
    assert "fsync is off" in found["durability"].reason
    assert found["trial"].reason == "not tried: it is a replica"


def test_dead_rows_that_nobody_clears_away_are_yellow(postgres_url: str) -> None:
    use(postgres_url)
    run(
        postgres_url,
        "ALTER TABLE onefold_records SET (autovacuum_enabled = off)",
        "INSERT INTO onefold_records (scope, operation, key, state, attempt, began, changed, revision, token, remark) "
        "SELECT '', 'fill', n::text, 'done', 1, 0, 0, 1, '', '' FROM generate_series(1, 12000) AS n",
        "DELETE FROM onefold_records WHERE operation = 'fill'",
        "SELECT pg_stat_force_next_flush()",
    )

    bad = checks_of(postgres_url)["dead rows"]
    run(postgres_url, "VACUUM onefold_records", "SELECT pg_stat_force_next_flush()")

    assert bad.grade is YELLOW
    assert "12,0" in bad.reason
    assert checks_of(postgres_url)["dead rows"].grade is GREEN


def test_a_purge_that_the_planner_does_without_its_index_is_yellow(postgres_url: str) -> None:
    use(postgres_url)
    run(
        postgres_url,
        "INSERT INTO onefold_records "
        "(scope, operation, key, state, attempt, began, changed, expires, due, revision, token, remark) "
        "SELECT '', 'fill', n::text, 'done', 1, 0, 0, 1e10 + n, (1e10 + n) / 600, 1, '', '' "
        "FROM generate_series(1, 12000) AS n",
        "ANALYZE onefold_records",
        "SELECT pg_stat_force_next_flush()",
    )
    good = checks_of(postgres_url)["indexes"]

    bad = checks_of(set_for_session(postgres_url, enable_indexscan="off", enable_bitmapscan="off"))["indexes"]

    assert (good.grade, bad.grade) == (GREEN, YELLOW)
    assert "plan" in bad.reason


def test_it_works_behind_a_pooler(pgbouncer_url: str) -> None:
    use(pgbouncer_url)

    assert grades_of(pgbouncer_url)["trial"] is GREEN


# MariaDB.


@pytest.fixture(scope="module")
def harmed(house: House) -> Iterator[Server]:
    with house.own("mariadb") as server:
        use(server.url)
        yield server


@pytest.mark.parametrize(
    ("setting", "good", "bad", "check", "grade"),
    [
        ("innodb_flush_log_at_trx_commit", "1", "0", "durability", RED),
        ("innodb_flush_log_at_trx_commit", "1", "2", "durability", YELLOW),
        ("read_only", "0", "1", "role", RED),
        ("max_allowed_packet", "16777216", "1048576", "max packet", YELLOW),
        ("tx_isolation", "'REPEATABLE-READ'", "'READ-UNCOMMITTED'", "isolation", YELLOW),
    ],
)
def test_a_bad_setting_of_mysql_is_seen(
    harmed: Server, setting: str, good: str, bad: str, check: str, grade: object
) -> None:
    run(harmed.url, f"SET GLOBAL {setting} = {good}")
    before = grades_of(harmed.url)
    run(harmed.url, f"SET GLOBAL {setting} = {bad}")
    after = grades_of(harmed.url)
    run(harmed.url, f"SET GLOBAL {setting} = {good}")

    assert (before[check], after[check]) == (GREEN, grade)
    assert after["trial"] is (UNKNOWN if check == "role" else GREEN)


def test_a_table_without_transactions_is_red(harmed: Server) -> None:
    run(harmed.url, "ALTER TABLE onefold_records ENGINE=Aria")
    found = checks_of(harmed.url)["engine"]
    run(harmed.url, "ALTER TABLE onefold_records ENGINE=InnoDB")

    assert found.grade is RED
    assert "Aria" in found.reason


# SQLite.


def _in_file(folder: Path, *statements: str) -> None:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(folder / "onefold.db", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_a_file_in_another_journal_mode_is_yellow(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/onefold.db"
    use(url)
    _in_file(tmp_path, "PRAGMA journal_mode = DELETE")

    assert checks_of(url)["journal"].grade is YELLOW


def test_a_lazy_sync_is_yellow(tmp_path: Path) -> None:
    assert checks_of(f"sqlite:///{tmp_path}/onefold.db?sync=normal")["synchronous"].grade is YELLOW


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act for another user")
def test_a_file_that_cannot_be_written_is_red_and_is_not_tried() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/onefold.db"
        use(url)
        os.chmod(folder, 0o755)
        found = as_nobody(lambda: checks_of(url))

    assert found["disk"].grade is RED
    assert found["trial"].reason == "not tried: the file cannot be written"


def as_nobody(work: Callable[[], dict[str, Check]]) -> dict[str, Check]:
    os.seteuid(NOBODY)
    try:
        return work()
    finally:
        os.seteuid(0)


def test_a_file_that_is_no_database_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "onefold.db").write_bytes(b"this is a diary" * 100)

    report = report_of(f"sqlite:///{tmp_path}/onefold.db")

    assert report.reached is False
    assert [check.grade for check in report.checks] == [RED]


# Over somebody else's connections.


def test_an_engine_of_sqlalchemy_is_examined_as_its_database_is(
    postgres_url: str, mysql_url: str, tmp_path: Path
) -> None:
    for url in (
        postgres_url.replace("postgresql:", "postgresql+psycopg:"),
        mysql_url.replace("mysql:", "mysql+pymysql:"),
        f"sqlite:///{tmp_path}/onefold.db",
    ):
        engine = create_engine(url)
        missing = grades_of(engine)["tables"]
        use(engine)
        found = checks_of(engine)
        engine.dispose()

        assert missing is YELLOW
        assert {"tables", "indexes", "purge", "trial"} < set(found)
        assert {check.grade for name, check in found.items() if name != "journal"} == {GREEN}


def test_facts_make_and_change_nothing(postgres_url: str) -> None:
    with Guard(postgres_url) as guard:
        store: Any = guard.store
        assert store.facts()["version"] == 0

    assert tables(postgres_url) == set()
    use(postgres_url)
    before = rows(postgres_url, "SELECT xmin::text, key FROM onefold_records")
    checks_of(postgres_url)

    assert rows(postgres_url, "SELECT xmin::text, key FROM onefold_records") == before
    with Guard(postgres_url) as guard:
        assert len(guard.store.browse(Query(), 10)) == 1
