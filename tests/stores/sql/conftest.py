"""The ledger that several files share: the driver is each file's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.sql.endings import Driver
from tests.stores.sqlalchemy.wallet import Ledger
from tests.wallet import create


@pytest.fixture
def ledger(request: pytest.FixtureRequest, driver: Driver, tmp_path: Path) -> Iterator[Ledger]:
    """A wallet in the driver's database, and what is counted there."""
    if driver.database == "sqlite":
        path = tmp_path / "wallet.db"
        create(path)
        ledger = Ledger("sqlite", str(path))
    else:
        fixture = {"postgres": "postgres_url", "mariadb": "mysql_url"}[driver.database]
        ledger = Ledger(driver.database, request.getfixturevalue(fixture))
    yield ledger
    ledger.close()
