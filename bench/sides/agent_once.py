"""agent-once: its decorator for tools, on SQLite and PostgreSQL. The arguments are the key."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

from bench.measure import Side
from bench.sides import decorated, decorated_async, library, postgres_database
from services.house import House

TITLE = "agent-once"


@contextmanager
def sqlite(_house: House) -> Iterator[Side]:
    once = library("once").Once
    with tempfile.TemporaryDirectory(prefix="onefold-bench-") as folder, closing(once(f"{folder}/once.db")) as opened:
        yield decorated(TITLE, opened.tool)


@contextmanager
def postgres(house: House) -> Iterator[Side]:
    once = library("once").Once
    with postgres_database(house) as url, closing(once(url)) as opened:
        yield decorated(TITLE, opened.tool)


@asynccontextmanager
async def postgres_async(house: House) -> AsyncIterator[Side]:
    once = library("once").Once
    with postgres_database(house) as url, closing(once(url)) as opened:
        yield decorated_async(TITLE, opened.tool)
