"""A guard that outlives its event loops forgets those that were closed, and what it had in them."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard


@pytest.mark.parametrize("store", ["memory", "sqlite", "postgres_url", "mysql_url", "redis_url", "dynamodb_url"])
def test_a_loop_that_was_closed_is_not_kept(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/records.db"}
    guard = AsyncGuard(urls.get(store) or str(request.getfixturevalue(store)))

    async def handler() -> None:
        await asyncio.sleep(0)

    async def deliver(key: str) -> Any:
        return await guard.run("charge", key, handler)

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, asyncio.BaseEventLoop) for one in gc.get_objects())

    asyncio.run(deliver("first"))
    before = kept()
    for number in range(5):
        asyncio.run(deliver(f"k{number}"))

    assert kept() <= before
    asyncio.run(guard.aclose())
