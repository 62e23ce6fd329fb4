"""The doctor on a database of Django's: examined as the database is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("django")

from tests.health.tools import GREEN, UNKNOWN, YELLOW, checks_of, left_behind, use
from tests.stores.django.project import alias_of, project


@pytest.fixture(autouse=True)
def _project() -> Iterator[None]:
    with project():
        yield


def test_djangos_database_is_examined_as_the_database_that_it_is(postgres_url: str) -> None:
    with alias_of("postgres", postgres_url) as alias:
        url = f"django://{alias}"
        before = checks_of(url)
        use(url)
        found = checks_of(url)
        left = left_behind(url)

    assert (before["tables"].grade, before["trial"].grade) == (YELLOW, UNKNOWN)
    assert {"role", "durability", "tables", "indexes", "purge", "trial"} < set(found)
    assert {check.grade for check in found.values()} == {GREEN}
    assert left == 0
