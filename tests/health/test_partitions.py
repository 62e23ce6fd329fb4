"""A table that somebody has partitioned by hand: the doctor counts it once, and finds a key that lets duplicates in."""

from __future__ import annotations

import re

import pytest

from onefold import Guard, OnefoldError, Policy, StoreUnavailable
from onefold.stores.base import Query
from tests.health.test_sql import run
from tests.health.tools import GREEN, RED, checks_of, left_behind, use
from tests.support import PROJECT, eventually

OF_OUR_COLUMNS = "(LIKE onefold_records INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING COMMENTS)"


def partition(url: str, by: str, key: str, *parts: str) -> None:
    """Make our table one of partitions, as the page of PostgreSQL does."""
    run(
        url,
        f"CREATE TABLE onefold_split {OF_OUR_COLUMNS} PARTITION BY {by}",
        "DROP TABLE onefold_records",
        "ALTER TABLE onefold_split RENAME TO onefold_records",
        f"ALTER TABLE onefold_records ADD CONSTRAINT onefold_records_pkey PRIMARY KEY ({key})",
        "CREATE INDEX onefold_records_due ON onefold_records (due) WHERE due IS NOT NULL",
        "CREATE INDEX onefold_records_held ON onefold_records (scope, operation, key) WHERE held",
        *(
            f"CREATE TABLE onefold_records_{number} PARTITION OF onefold_records FOR VALUES {values}"
            for number, values in enumerate(parts)
        ),
    )


def analyzed(url: str, records: str) -> bool:
    """Whether an ANALYZE has counted so many records.

    A session reports what it has inserted up to a second later, and that is added to what an ANALYZE has counted by
    then: only the next one counts right, or the server's own, a minute later.
    """
    run(url, "ANALYZE onefold_records")
    return records in checks_of(url)["size"].reason


PAGE = PROJECT / "docs" / "stores" / "postgres.md"

ADDRESS = "scope, operation, key"
BY_HASH = [f"WITH (MODULUS 4, REMAINDER {rest})" for rest in range(4)]
BY_KEY = ["FROM (MINVALUE) TO ('m')", "FROM ('m') TO (MAXVALUE)"]


@pytest.mark.parametrize(
    ("by", "parts"), [(f"HASH ({ADDRESS})", BY_HASH), ("RANGE (key)", BY_KEY)], ids=["hash", "range of keys"]
)
def test_a_table_partitioned_by_its_address_is_green_and_counted_once(
    postgres_url: str, by: str, parts: list[str]
) -> None:
    use(postgres_url)
    partition(postgres_url, by, ADDRESS, *parts)
    with Guard(postgres_url) as guard:
        for key in "abcdefghijklmnopqrstuvwxyz":
            assert guard.run("charge", key, lambda: "paid").value == "paid"
            assert guard.run("charge", key, lambda: "again").value == "paid"
        counted = guard.store.sample(Query(), 1_000)
        listed = guard.store.browse(Query(), 1_000)
    assert eventually(lambda: analyzed(postgres_url, "about 26 records"))

    found = checks_of(postgres_url)

    assert {name: check for name, check in found.items() if check.grade is not GREEN} == {}
    assert f"in {len(parts)} partitions" in found["uniqueness"].reason
    assert "0 bytes" not in found["size"].reason
    assert counted.complete
    assert len(counted.records) == len(listed) == 26
    assert left_behind(postgres_url) == 0


def test_the_statements_of_the_page_keep_the_records_and_what_they_find(postgres_url: str) -> None:
    use(postgres_url)
    (statements,) = re.findall(r"```sql\n(BEGIN;\nALTER.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)

    run(postgres_url, statements)

    found = checks_of(postgres_url)
    assert {name: check for name, check in found.items() if check.grade is not GREEN} == {}
    assert "in 4 partitions" in found["uniqueness"].reason
    with Guard(postgres_url) as guard:
        assert guard.run("charge", "pay_7f3a", lambda: 1).replayed


def test_a_key_without_a_partition_is_refused(postgres_url: str) -> None:
    use(postgres_url)
    partition(postgres_url, "RANGE (key)", ADDRESS, BY_KEY[0])

    with Guard(postgres_url) as guard, pytest.raises(StoreUnavailable, match="partition"):
        guard.run("charge", "z", lambda: "paid")


def test_the_plan_of_a_purge_may_name_the_index_of_a_partition(postgres_url: str) -> None:
    use(postgres_url)
    partition(postgres_url, f"HASH ({ADDRESS})", ADDRESS, *BY_HASH)
    run(
        postgres_url,
        "INSERT INTO onefold_records (began, changed, due, expires, attempt, revision, scope, operation, key, state, "
        "token, remark) SELECT 1, 1, 1500000000, 9e11, 1, 1, '', 'charge', i::text, 'done', '\\x00', '' "
        "FROM generate_series(1, 12000) AS i",
    )

    assert eventually(lambda: analyzed(postgres_url, "about 12,000 records"))

    assert checks_of(postgres_url)["indexes"].grade is GREEN


def test_a_table_partitioned_by_time_is_red_because_it_does_not_keep_keys_apart(postgres_url: str) -> None:
    use(postgres_url)
    partition(postgres_url, "RANGE (began)", f"{ADDRESS}, began", "FROM (MINVALUE) TO (MAXVALUE)")

    found = checks_of(postgres_url)["uniqueness"]

    assert found.grade is RED
    assert "its primary key is (scope, operation, key, began)" in found.reason
    with Guard(postgres_url) as guard, pytest.raises(OnefoldError):
        guard.run("charge", "a", lambda: "paid")


def test_a_purge_of_one_partition_leaves_what_is_at_the_same_place_of_another(postgres_url: str) -> None:
    use(postgres_url)
    partition(postgres_url, "RANGE (key)", ADDRESS, *BY_KEY)
    with Guard(f"{postgres_url}?purge=no", policy=Policy(keep="1h")) as guard:
        assert [guard.run("charge", key, lambda: "paid").value for key in "az"] == ["paid", "paid"]
        run(postgres_url, "UPDATE onefold_records SET expires = 1, due = 0 WHERE key = 'a'")
        # Both at the same place of their partitions.
        run(postgres_url, "UPDATE onefold_records SET attempt = 1 WHERE key = 'z'")

        assert guard.store.purge(10) == 1
        assert guard.run("charge", "z", lambda: "again").value == "paid"
