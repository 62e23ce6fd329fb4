"""The tables of `?partitions=`: how they are asked for, made of existing ones, and what survives a sealing."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

import pytest
from psycopg_pool import ConnectionPool

from onefold import Guard, StoreUnavailable, UsageError
from onefold._concurrency import generators as flows
from onefold.stores.base import Query
from onefold.stores.postgres import adopt, check_url, open_store
from onefold.stores.postgres.partitions.dialect import Partitioned
from onefold.stores.schema import apply, describe
from onefold.stores.sql.connection import Database
from onefold.stores.sql.dialect import Reply
from onefold.stores.sql.tables import make
from tests.health.test_sql import run
from tests.health.tools import GREEN, RED, UNKNOWN, YELLOW, checks_of
from tests.stores.postgres.partitions.tools import expire, guard_on, partitioned, seal, sealed, where
from tests.stores.postgres.tools import another, records, rows
from tests.support import PATIENCE, PROJECT, Elsewhere

PAGE = (PROJECT / "docs" / "stores" / "postgres.md").read_text("utf-8")

# With their numbers: an index that is built again has another.
INDEXES = "SELECT indexrelid::bigint FROM pg_index WHERE indrelid = 'onefold_records'::regclass ORDER BY 1"
TRIGGERS = "SELECT tgname FROM pg_trigger WHERE tgname = 'onefold_partitions'"


@pytest.fixture
def app() -> str:
    """The name of a role: roles belong to the server, which other tests use, too."""
    return f"onefold_app_{secrets.token_hex(4)}"


@pytest.mark.parametrize("period", ["hour", "day", "week", "month", "DAY"])
def test_a_period_is_accepted(period: str) -> None:
    check_url(partitioned("postgresql://localhost/shop", period), is_async=False)


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match=r"partitions='dya' is not one of .* did you mean 'day'"):
        check_url("postgresql://localhost/shop?partitions=dya", is_async=False)


def test_a_pool_of_the_callers_may_have_partitions(postgres_url: str) -> None:
    with ConnectionPool(postgres_url, open=True) as pool:
        guard = Guard(adopt(pool, is_async=False, partitions="day"))  # type: ignore[arg-type]
        guard.run("charge", "k", lambda: 1)
        assert seal(postgres_url)
        assert guard.run("charge", "k", lambda: 2).replayed
        guard.close()


def test_an_existing_table_becomes_the_first_partition(postgres_url: str) -> None:
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)

    said = apply(partitioned(postgres_url))

    assert said is not None
    assert said[0].endswith("Onefold's tables exist, version 2, in partitions of a day")
    with guard_on(postgres_url) as guard:
        assert guard.run("charge", "k", lambda: 2).replayed
        assert seal(postgres_url)
        assert guard.run("charge", "k", lambda: 2).replayed
    assert where(postgres_url, "k") == sealed(postgres_url)


def test_without_permission_to_change_tables_one_line_says_what_to_do(postgres_url: str) -> None:
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)

    with (
        Guard(f"{partitioned(postgres_url)}&auto_schema=no") as guard,
        pytest.raises(StoreUnavailable, match=r"has no partitions yet.*onefold schema --store URL --apply"),
    ):
        guard.run("charge", "k", lambda: 2)


def test_a_table_that_was_partitioned_by_hand_is_refused(postgres_url: str) -> None:
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute("CREATE TABLE mine (LIKE onefold_records) PARTITION BY HASH (scope, operation, key)")
        connection.execute("DROP TABLE onefold_records")
        connection.execute("ALTER TABLE mine RENAME TO onefold_records")

    with guard_on(postgres_url) as guard, pytest.raises(StoreUnavailable, match="partitioned by hand"):
        guard.run("charge", "k", lambda: 2)


# Each names the table itself, and would stay with the partition that is sealed.
NAMING_THE_TABLE = {
    "row-level security": "ALTER TABLE onefold_records ENABLE ROW LEVEL SECURITY",
    # It outlives the tables of a test.
    "a publication": "DROP PUBLICATION IF EXISTS mine; CREATE PUBLICATION mine FOR TABLE onefold_records",
    "the view mine": "CREATE VIEW mine AS SELECT key FROM onefold_records",
    "the view mine_too": "CREATE MATERIALIZED VIEW mine_too AS SELECT count(*) FROM onefold_records",
    "a rule": "CREATE RULE mine AS ON DELETE TO onefold_records DO ALSO NOTIFY mine",
    "a foreign key": "CREATE TABLE mine (scope text, operation text, key text, "
    "FOREIGN KEY (scope, operation, key) REFERENCES onefold_records)",
    "the trigger mine": "CREATE TRIGGER mine BEFORE UPDATE ON onefold_records FOR EACH ROW "
    "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
}


@pytest.mark.parametrize("what", NAMING_THE_TABLE)
def test_what_would_stay_behind_with_a_partition_is_refused(postgres_url: str, what: str) -> None:
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute(NAMING_THE_TABLE[what].encode())

    with guard_on(postgres_url) as guard, pytest.raises(StoreUnavailable, match=f"the table has {what}, which would"):
        guard.run("charge", "k", lambda: 2)


@pytest.mark.parametrize("what", NAMING_THE_TABLE)
def test_nothing_is_sealed_where_something_would_stay_behind(postgres_url: str, what: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
        with another(postgres_url) as connection:
            connection.execute(NAMING_THE_TABLE[what].encode())

        with pytest.raises(Exception, match=f"the table has {what}, which would"):
            seal(postgres_url)
        assert sealed(postgres_url) == []
        assert guard.run("charge", "k", lambda: 2).replayed


@pytest.mark.parametrize("of", ["ALL TABLES", "TABLES IN SCHEMA public"])
def test_a_publication_of_all_tables_is_refused_and_nothing_is_sealed_meanwhile(postgres_url: str, of: str) -> None:
    """Its subscriber would meet a table that it does not have, and end."""
    with guard_on(postgres_url) as guard, another(postgres_url) as connection:
        guard.run("charge", "k", lambda: 1)
        connection.execute(f"CREATE PUBLICATION onefold_all FOR {of}".encode())
        try:
            with pytest.raises(Exception, match="the table has a publication, which would"):
                seal(postgres_url)
            connection.execute("DROP TRIGGER onefold_partitions ON onefold_records")
            with guard_on(postgres_url) as other, pytest.raises(StoreUnavailable, match="a publication"):
                other.run("charge", "l", lambda: 1)
        finally:
            connection.execute("DROP PUBLICATION onefold_all")


def test_the_printed_schema_makes_the_same_tables(postgres_url: str) -> None:
    script = describe(partitioned(postgres_url))
    assert script is not None
    with another(postgres_url) as connection:
        connection.execute(script.encode())

    with Guard(f"{partitioned(postgres_url)}&auto_schema=no") as guard:
        guard.run("charge", "k", lambda: 1)
        assert seal(postgres_url)
        assert guard.run("charge", "k", lambda: 2).replayed


def test_indexes_options_owner_and_grants_survive_a_sealing(postgres_url: str, app: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute(f"CREATE ROLE {app}".encode())
        connection.execute(
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON onefold_records TO {app} WITH GRANT OPTION".encode()
        )
        connection.execute("GRANT SELECT ON onefold_records TO PUBLIC")
        connection.execute("CREATE INDEX mine ON onefold_records (remark)")
    try:
        before = described(postgres_url)
        assert seal(postgres_url)
        after = described(postgres_url)
    finally:
        with another(postgres_url) as connection:
            connection.execute(f"DROP OWNED BY {app}".encode())
            connection.execute(f"DROP ROLE {app}".encode())

    assert after == before
    assert len(before) == 5 + 1


def described(url: str) -> list[object]:
    """What people see of the current table."""
    indexes = rows(
        url,
        "SELECT pg_get_indexdef(indexrelid), indisprimary FROM pg_index "
        "WHERE indrelid = 'onefold_records'::regclass ORDER BY 1",
    )
    table = rows(url, "SELECT reloptions, relowner, relacl::text FROM pg_class WHERE oid = 'onefold_records'::regclass")
    return [*indexes, *table]


def test_a_user_who_may_not_seal_purges_row_by_row(postgres_url: str, app: str) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    with another(postgres_url) as connection:
        connection.execute(f"CREATE ROLE {app} LOGIN PASSWORD 'app'".encode())
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON onefold_records TO {app}".encode())
        connection.execute(f"GRANT SELECT ON onefold_schema TO {app}".encode())
        connection.execute(f"GRANT USAGE ON SCHEMA public TO {app}".encode())
    try:
        seal(postgres_url)
        userless = postgres_url.partition("@")[2]
        with guard_on(f"postgresql://{app}:app@{userless}") as guard:
            again = guard.run("charge", "k", lambda: 2)
            guard.run("charge", "new", lambda: 3)
            expire(postgres_url)
            removed = guard.store.purge(10)
    finally:
        with another(postgres_url) as connection:
            connection.execute(f"DROP OWNED BY {app}".encode())
            connection.execute(f"DROP ROLE {app}".encode())

    assert again.replayed
    assert removed == 1
    assert records(postgres_url) == ["k"]


def test_each_schema_has_partitions_of_its_own(postgres_url: str) -> None:
    urls = []
    for tenant in ("asha", "Riya's"):
        with another(postgres_url) as connection:
            connection.execute(f'CREATE SCHEMA "{tenant}"'.encode())
        option = f'-csearch_path="{tenant}"'.replace("=", "%3D").replace('"', "%22").replace("'", "%27")
        urls.append(f"{postgres_url}?options={option}")
    for url in urls:
        with guard_on(url) as guard:
            guard.run("charge", "k", lambda: 1)
    assert seal(urls[1])

    for url in urls:
        with guard_on(url) as guard:
            assert guard.run("charge", "k", lambda: 2).replayed
            assert [one.address.key for one in guard.store.browse(Query(), 10)] == ["k"]
    assert [len(sealed(url)) for url in urls] == [0, 1]


def test_the_tools_see_all_partitions(postgres_url: str) -> None:
    with guard_on(postgres_url) as guard:
        for key in "abc":
            guard.run("charge", key, lambda: 1)
            seal(postgres_url)
        guard.run("charge", "d", lambda: 1)

        listed = [one.address.key for one in guard.store.browse(Query(), 10)]
        sampled = [one.address.key for one in guard.store.sample(Query(), 10).records]
        kept_longest = len(guard.store.unsettled(10))
        shown = guard.store.stored(guard.store.browse(Query(key="a"), 1)[0].address)

    assert (listed, sorted(sampled), kept_longest) == (list("abcd"), list("abcd"), 4)
    assert shown.columns["key"] == "a"


def test_the_doctor_looks_at_the_partitions(postgres_url: str) -> None:
    url = partitioned(postgres_url)
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)
    without = checks_of(f"{url}&auto_schema=no")["partitions"]
    with guard_on(postgres_url) as guard:
        guard.run("charge", "l", lambda: 1)
        seal(postgres_url)
        guard.run("charge", "m", lambda: 1)
    fine = checks_of(url)
    elsewhere = checks_of(postgres_url)["partitions"]
    store = open_store(url)
    store.close()
    with another(postgres_url) as connection:
        connection.execute("DROP TRIGGER onefold_partitions ON onefold_records")
        connection.execute(
            "CREATE TRIGGER onefold_partitions BEFORE INSERT ON onefold_records FOR EACH ROW "
            "EXECUTE FUNCTION onefold_records_once('1', '1')"
        )
    late = checks_of(url)["partitions"]

    assert without.grade is RED
    assert {name: check for name, check in fine.items() if check.grade is not GREEN} == {}
    assert fine["partitions"].reason.startswith("1 sealed partition")
    assert "in 1 partition" in fine["uniqueness"].reason
    assert (elsewhere.grade, late.grade) == (GREEN, YELLOW)


def test_the_doctor_is_red_if_the_trigger_is_missing(postgres_url: str) -> None:
    """As after a dump of the tables alone, which leaves out its function."""
    with guard_on(postgres_url) as guard:
        guard.run("charge", "k", lambda: 1)
    seal(postgres_url)
    with another(postgres_url) as connection:
        connection.execute("DROP FUNCTION onefold_records_once() CASCADE")

    found = checks_of(postgres_url)["uniqueness"]
    with guard_on(postgres_url) as guard:
        again = guard.run("charge", "k", lambda: 2)

    assert (found.grade, again.replayed) == (RED, True)
    assert "no trigger" in found.reason
    assert checks_of(postgres_url)["uniqueness"].grade is GREEN


def test_the_doctor_does_not_partition_a_table(postgres_url: str) -> None:
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)

    found = checks_of(partitioned(postgres_url))

    assert (found["partitions"].grade, found["trial"].grade) == (YELLOW, UNKNOWN)
    assert not rows(postgres_url, TRIGGERS)


def test_a_worker_that_turns_partitions_on_starts(postgres_url: str) -> None:
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)

    with Guard(partitioned(postgres_url)) as guard:
        guard.check()

    assert rows(postgres_url, TRIGGERS)


def test_an_index_that_was_built_before_is_used(postgres_url: str) -> None:
    (statement,) = re.findall(r"```sql\n(CREATE INDEX CONCURRENTLY .*?)```", PAGE, flags=re.DOTALL)
    with Guard(postgres_url) as plain:
        plain.run("charge", "k", lambda: 1)
    run(postgres_url, statement)
    built = rows(postgres_url, INDEXES)

    apply(partitioned(postgres_url))

    assert rows(postgres_url, TRIGGERS)
    assert rows(postgres_url, INDEXES) == built


def test_the_way_back_of_the_page_keeps_every_live_record(postgres_url: str) -> None:
    (statements,) = re.findall(r"```sql\n(BEGIN;\nLOCK.*?)```", PAGE, flags=re.DOTALL)
    with guard_on(postgres_url) as guard:
        for key in ("a", "b", "expired"):
            guard.run("charge", key, lambda: 1)
        guard.run("charge", "forever", lambda: 1, keep="forever")
        seal(postgres_url)
        expire(postgres_url, "key IN ('b', 'expired')")
        guard.run("charge", "b", lambda: 2)
        guard.run("charge", "c", lambda: 1)
    (sealed_in,) = where(postgres_url, "expired")
    assert sealed_in != "onefold_records"

    run(postgres_url, statements)

    assert records(postgres_url) == ["a", "b", "c", "forever"]
    with Guard(postgres_url) as plain:
        assert plain.run("charge", "b", lambda: 3).value == 2
    found = checks_of(postgres_url)
    assert "partitions" not in found
    assert {name: check for name, check in found.items() if check.grade is not GREEN} == {}


@pytest.mark.more
def test_whoever_opens_the_store_just_as_a_partition_is_sealed_finds_it(postgres_url: str) -> None:
    """Of a table that is renamed at this moment, a statement may find the name and not the trigger."""
    url, is_over = partitioned(postgres_url), threading.Event()
    sealings: list[str] = []
    with Guard(url) as guard:
        guard.run("charge", "k", lambda: 1)

    def seal_again_and_again() -> None:
        while not is_over.is_set():
            # One that has expired long ago: its partition can be dropped, so that there are never too many.
            with another(postgres_url) as connection:
                connection.execute(
                    "INSERT INTO onefold_records "
                    "(scope, operation, key, state, token, remark, began, changed, attempt, revision, expires, due) "
                    f"VALUES ('', 'charge', '{secrets.token_hex(8)}', 'done', '', '', 0, 0, 1, 1, 0, 0)".encode()
                )
            if seal(postgres_url):
                sealings.append("sealed")

    def looks(least: int) -> Iterator[int]:
        """Yield for so many looks, and for as many more as it takes until it was sealed often enough meanwhile."""

        def is_needed(number: int) -> bool:
            is_sealed_often = len(sealings) >= 50 or any(sealer.has_ended for sealer in sealers)
            return number < least or not is_sealed_often

        return takewhile(is_needed, count())

    def lay_out() -> None:
        store = open_store(url)
        for _ in looks(1_000):
            with store._pool.acquire() as connection:
                flows.run(made(store.database, connection), connection)
        store.close()

    def look() -> None:
        store = open_store(url)
        for _ in looks(10_000):
            with store._pool.acquire() as connection:
                assert flows.run(store.database.sql.is_laid_out(), connection)
        store.close()

    sealers = [Elsewhere(seal_again_and_again) for _ in range(2)]
    openers = [Elsewhere(lay_out), Elsewhere(look)]
    try:
        for opener in openers:
            opener.result(PATIENCE * 3)
    finally:
        is_over.set()

    for sealer in sealers:
        sealer.result()
    assert len(sealings) >= 50


@pytest.mark.parametrize(
    ("looks", "is_laid_out"),
    [
        ([(1, 7)], True),
        ([(0, 7), (0, 7)], False),
        ([(0, None), (0, None)], False),
        ([(0, 7), (1, 7)], True),
        # As often as it was sealed meanwhile.
        ([(0, 7), (0, 8), (0, 9), (0, 10), (1, 10)], True),
        ([(0, 7), (0, 8), (0, 8)], False),
    ],
)
def test_a_table_without_a_trigger_is_believed_once_none_was_sealed_meanwhile(
    looks: list[tuple[int, int | None]], is_laid_out: bool
) -> None:
    replies = [Reply(written=0, rows=[look]) for look in looks]

    assert answered(Partitioned("day", 86_400.0).is_laid_out(), replies) is is_laid_out
    assert replies == []


def answered(flow: flows.Flow[Any], replies: list[Reply]) -> Any:
    """What a flow comes to if the server replies so."""
    try:
        next(flow)
        while True:
            flow.send(replies.pop(0))
    except StopIteration as end:
        return end.value


def made(database: Database, connection: Any) -> flows.Flow[None]:
    """Create the tables, whoever has done so already."""
    yield connection.begin
    yield from database.sql.begin_making()
    yield from make(database)
    yield connection.commit
