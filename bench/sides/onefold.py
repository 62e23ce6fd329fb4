"""Our own sides, blocking: claim mode as most people use it, with a payload that is compared too."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from bench.measure import Side
from bench.sides import Handler, decorated, mariadb_database, postgres_database, redis_prefix
from bench.sides.by_hand import dynamo_server
from onefold import Guard, Policy
from services import dynamodb
from services.house import House


def guarded(guard: Guard) -> Side:
    return decorated("idempotent", guard.idempotent("charge", key="payment_id"))


@contextmanager
def memory(_house: House) -> Iterator[Side]:
    with Guard("memory:") as guard:
        yield guarded(guard)


@contextmanager
def memory_run(_house: House) -> Iterator[Side]:
    """Without a payload, which BabelQueue does not compare either."""
    with Guard("memory:") as guard:
        yield run(guard)


@contextmanager
def memory_seen(_house: House) -> Iterator[Side]:
    """What BabelQueue promises, and no more: one look, and one write after success."""
    with Guard("memory:", policy=Policy(mode="seen")) as guard:
        yield run(guard)


def run(guard: Guard) -> Side:
    handler = Handler()

    def handle() -> None:
        handler()

    def deliver(key: str) -> None:
        guard.run("charge", key, handle)

    return Side("run", deliver, deliver, handler.times)


@contextmanager
def sqlite(_house: House, sync: str = "full") -> Iterator[Side]:
    with (
        tempfile.TemporaryDirectory(prefix="onefold-bench-") as folder,
        Guard(f"sqlite:///{folder}/onefold.db?sync={sync}") as guard,
    ):
        yield guarded(guard)


@contextmanager
def sqlite_normal(house: House) -> Iterator[Side]:
    with sqlite(house, sync="normal") as side:
        yield side


@contextmanager
def redis(house: House) -> Iterator[Side]:
    with redis_prefix(house) as (url, prefix), Guard(f"{url}?prefix={prefix}") as guard:
        yield guarded(guard)


@contextmanager
def postgres(house: House) -> Iterator[Side]:
    with postgres_database(house) as url, Guard(url) as guard:
        yield guarded(guard)


@contextmanager
def mysql(house: House) -> Iterator[Side]:
    with mariadb_database(house) as url, Guard(url) as guard:
        yield guarded(guard)


@contextmanager
def dynamo(house: House) -> Iterator[Side]:
    server, prefix = dynamo_server(house), f"bench_{secrets.token_hex(4)}"
    with Guard(dynamodb.store_url(server, prefix)) as guard:
        try:
            yield guarded(guard)
        finally:
            dynamodb.delete_tables(server, prefix)
