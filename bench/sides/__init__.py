"""The rivals of a benchmark, one context manager each: it opens what the side needs, and leaves nothing behind.

`onefold` has our sides, `by_hand` the limits; each other module has one library, which is imported when it is asked
for and may be missing.
"""

from __future__ import annotations

import importlib
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.measure import Side
from services import mariadb, postgres
from services.house import House

AMOUNT: Final = 4200


class Handler:
    """What all sides run: it does nothing but count, in any thread."""

    def __init__(self) -> None:
        self._calls: list[None] = []

    def __call__(self) -> None:
        self._calls.append(None)

    def times(self) -> int:
        return len(self._calls)


def decorated(title: str, decorate: Callable[..., Any], *, by_name: bool = False) -> Side:
    """Make a side of a library that decorates a function of two arguments."""
    handler = Handler()

    def charge(payment_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
        handler()

    guarded = decorate(charge)

    def deliver(key: str) -> None:
        if by_name:
            guarded(payment_id=key, amount=AMOUNT)
        else:
            guarded(key, AMOUNT)

    return Side(title, deliver, deliver, handler.times)


def decorated_async(title: str, decorate: Callable[..., Any], *, by_name: bool = False) -> Side:
    """Make a side of a library that decorates a coroutine function of two arguments."""
    handler = Handler()

    async def charge(payment_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
        handler()

    guarded = decorate(charge)

    def deliver(key: str) -> Awaitable[Any]:
        called: Awaitable[Any] = guarded(payment_id=key, amount=AMOUNT) if by_name else guarded(key, AMOUNT)
        return called

    return Side(title, deliver, deliver, handler.times)


def library(module: str) -> Any:
    """Import what is no dependency of ours: a type checker does not know it, and it may not be there."""
    return importlib.import_module(module)


def version_of(program: str) -> str:
    """Return what a server's program says of itself, in its first line."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return said.partition("\n")[0].strip()


@contextmanager
def redis_prefix(house: House) -> Iterator[tuple[str, str]]:
    """Yield the URL of a Redis, and a prefix as long as `onefold`, whose keys are removed at the end."""
    import redis

    url, prefix = house["redis"].url, f"b{secrets.token_hex(3)}"
    try:
        yield url, prefix
    finally:
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(f"*{prefix}*", count=1_000):
                client.unlink(key)


@contextmanager
def postgres_database(house: House) -> Iterator[str]:
    """Yield the URL of a database of this side alone."""
    database = postgres.Database(house["postgres"])
    try:
        yield database.url
    finally:
        database.drop()


@contextmanager
def mariadb_database(house: House) -> Iterator[str]:
    database = mariadb.Database(house["mariadb"])
    database.empty()
    try:
        yield database.url
    finally:
        database.drop()
