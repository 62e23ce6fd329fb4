"""Databases for faults that have to be met on each of them, whoever owns the connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg_pool
import pytest
from sqlalchemy import Engine, create_engine, text

# A guard's own connections to each database, and those of a caller's pool or engine.
SOURCES: dict[str, Callable[[str], Any]] = {
    "sqlite": str,
    "postgres": str,
    "mysql": str,
    "postgres, a caller's pool": lambda url: psycopg_pool.ConnectionPool(url, min_size=1, max_size=2, open=True),
    "postgres, SQLAlchemy": lambda url: create_engine(url.replace("postgresql://", "postgresql+psycopg://")),
    "mysql, SQLAlchemy": lambda url: create_engine(url.replace("mysql://", "mysql+pymysql://")),
}
DATABASES = {"postgres": "postgres_url", "mysql": "mysql_url"}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A database with an empty table of effects."""
    fixture = DATABASES.get(request.param.partition(",")[0])
    url = f"sqlite:///{tmp_path}/wallet.db" if fixture is None else request.getfixturevalue(fixture)
    raw = create_engine(url.replace("postgresql://", "postgresql+psycopg://").replace("mysql://", "mysql+pymysql://"))
    with raw.begin() as connection:
        connection.execute(text("CREATE TABLE effects (who varchar(20))"))
    raw.dispose()
    made = SOURCES[request.param](url)
    yield made
    if not isinstance(made, str):
        (made.dispose if isinstance(made, Engine) else made.close)()
