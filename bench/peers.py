"""Other libraries in the place of the work by hand, where they are installed: `--peers`.

Each is called as its own documentation shows it first. A ratio below one means that the guard is the faster.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.measure import Pair, Side
from bench.pairs import Handler, guarded
from onefold import Guard
from services.house import House


@contextmanager
def exactly_once_memory(_house: House) -> Iterator[Pair]:
    with Guard("memory:") as guard:
        yield Pair(guarded(guard, "idempotent"), _exactly_once(_library("exactly_once").Store.memory()))


@contextmanager
def exactly_once_redis(house: House) -> Iterator[Pair]:
    with _redis(house) as (url, prefix), Guard(f"{url}?prefix={prefix}") as guard:
        yield Pair(guarded(guard, "idempotent"), _exactly_once(_library("exactly_once").Store.redis(url), prefix))


def _exactly_once(store: Any, prefix: str = "charge") -> Side:
    guard = _library("exactly_once").once(store, key=lambda payment_id, _amount: f"{prefix}:{payment_id}")
    return _side("exactly-once", guard)


@contextmanager
def idemkit_memory(_house: House) -> Iterator[Pair]:
    with Guard("memory:") as guard:
        yield Pair(guarded(guard, "idempotent"), _idemkit(_library("idemkit").InMemoryBackend()))


@contextmanager
def idemkit_redis(house: House) -> Iterator[Pair]:
    with _redis(house) as (url, prefix), Guard(f"{url}?prefix={prefix}") as guard:
        backend = _library("idemkit").RedisBackend.from_url(url, namespace=f"{prefix}-peer")
        yield Pair(guarded(guard, "idempotent"), _idemkit(backend))


def _idemkit(backend: Any) -> Side:
    idemkit = _library("idemkit")
    config = idemkit.MethodConfig(key_fields=["payment_id"], scope=lambda *_args, **_kwargs: "bench")
    return _side("idemkit", idemkit.idempotent_sync(backend=backend, config=config))


@contextmanager
def powertools_redis(house: House) -> Iterator[Pair]:
    import redis

    powertools = _library("aws_lambda_powertools.utilities.idempotency")
    layers = _library("aws_lambda_powertools.utilities.idempotency.persistence.redis")
    with _redis(house) as (url, prefix), Guard(f"{url}?prefix={prefix}") as guard, redis.Redis.from_url(url) as client:
        decorate = powertools.idempotent_function(
            data_keyword_argument="payment_id",
            persistence_store=layers.RedisCachePersistenceLayer(client=client),
            config=powertools.IdempotencyConfig(),
            key_prefix=prefix,
        )
        yield Pair(guarded(guard, "idempotent"), _side("Powertools", decorate, by_name=True))


def _library(module: str) -> Any:
    """Not a dependency of ours: a type checker does not know it, and it may not be there."""
    return importlib.import_module(module)


def _side(title: str, decorate: Callable[..., Any], *, by_name: bool = False) -> Side:
    """The same function, decorated by another library."""
    handler = Handler()

    def charge(payment_id: str, amount: int) -> None:  # noqa: ARG001 - they are what is delivered
        handler()

    decorated = decorate(charge)

    def deliver(key: str) -> None:
        if by_name:
            decorated(payment_id=key, amount=4200)
        else:
            decorated(key, 4200)

    return Side(title, deliver, deliver, handler.times)


@contextmanager
def _redis(house: House) -> Iterator[tuple[str, str]]:
    """A Redis, and a prefix whose keys are removed at the end."""
    import redis

    url, prefix = house["redis"].url, f"bench-{secrets.token_hex(4)}"
    try:
        yield url, prefix
    finally:
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(f"*{prefix}*", count=1_000):
                client.delete(key)


PEERS: Final = {
    "memory, exactly-once": exactly_once_memory,
    "memory, idemkit": idemkit_memory,
    "redis, exactly-once": exactly_once_redis,
    "redis, idemkit": idemkit_redis,
    "redis, Powertools": powertools_redis,
}
