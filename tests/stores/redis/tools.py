"""Words for the tests of the Redis store: entries, and a sync or async store behind a blocking face."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onefold._model import Address, Claim, Ending, Entry, State
from onefold.stores.redis import AsyncRedisStore, RedisStore
from onefold.testing.promises._twice import Blocking

MODES = ("blocking", "async")

DONE = Ending(state=State.DONE, ttl=60.0, result=b"result")


def entry(key: str = "key", **fields: Any) -> Entry:
    usual: dict[str, Any] = {
        "address": Address("", "charge", key),
        "token": os.urandom(16),
        "lease": 30.0,
        "ttl": 90.0,
    }
    return Entry(**(usual | fields))


def claim_of(entry: Entry) -> Claim:
    return Claim(entry.address, entry.token, entry.lease, entry.ttl)


@contextmanager
def opened(mode: str, source: Any, **options: Any) -> Iterator[Any]:
    """A store of this kind, which is closed afterwards."""
    if mode == "blocking":
        store = RedisStore(source, **options)
        yield store
        store.close()
        return
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        async_store = AsyncRedisStore(source, **options)
        yield Blocking(async_store, runner)
        runner.run(async_store.aclose())
