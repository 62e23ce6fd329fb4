"""BabelQueue's guard: `wrap` with the one store that it brings. It remembers what it has seen, and claims nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.measure import Side
from bench.sides import AMOUNT, Handler, library
from services.house import House


@contextmanager
def memory(_house: House) -> Iterator[Side]:
    idempotency = library("babelqueue.idempotency")
    handler = Handler()

    def handle(_data: object, _meta: object) -> None:
        handler()

    wrapped = idempotency.wrap(idempotency.InMemoryStore(), handle)

    def deliver(key: str) -> None:
        wrapped(AMOUNT, {"id": key})

    yield Side("BabelQueue's wrap", deliver, deliver, handler.times)
