"""Race from several processes, each with its own store on the shared records."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from onefold import AsyncGuard, Guard
from onefold.stores.base import Entry, Record

# Far more than a process needs to start; it bounds how long a broken one hangs.
PATIENCE: Final = 120.0

# Not forked: a fork would inherit this process's connections.
START_METHOD: Final = "spawn"

# The entry to claim, and the record it replaces.
Pair = tuple[Entry, Record | None]


def race_in_processes(
    source: Any, rivals: Sequence[Sequence[Entry]], seen: Sequence[Record | None], *, is_async: bool
) -> list[list[Any]]:
    """Let each process claim its own entries, all starting at once; return the answers of each."""
    context = multiprocessing.get_context(START_METHOD)
    start = context.Barrier(len(rivals))
    running = []
    for entries in rivals:
        here, there = context.Pipe(duplex=False)
        claims = _claims_async if is_async else _claims
        pairs = list(zip(entries, seen, strict=True))
        process = context.Process(target=_tell, args=(claims, source, pairs, start, there), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    try:
        answers = _hear([connection for _, connection in running])
        for process, _ in running:
            process.join(PATIENCE)
        return answers
    finally:
        for process, connection in running:
            connection.close()
            process.terminate()
            process.join()
            process.close()


def _hear(connections: Sequence[Connection]) -> list[list[Any]]:
    """Return the answers in the order of the processes, read as they arrive: the first failure ends the race."""
    answers: dict[Any, list[Any]] = {}
    while len(answers) < len(connections):
        ready = wait([connection for connection in connections if connection not in answers], PATIENCE)
        assert ready, f"a process did not answer within {PATIENCE:g} s"
        for connection in ready:
            assert isinstance(connection, Connection)
            answers[connection] = _heard(connection)
    return [answers[connection] for connection in connections]


def _heard(connection: Connection) -> list[Any]:
    try:
        answer = connection.recv()
    except EOFError:
        answer = "it ended before it could answer"
    assert isinstance(answer, list), f"a process failed: {answer}"
    return answer


def _tell(claims: Callable[..., list[Any]], source: Any, pairs: Sequence[Pair], start: Any, answer: Connection) -> None:
    """Claim in a process, and send the answers to the test, or the error that it fails with."""
    try:
        answer.send(claims(source, pairs, start))
    except BaseException as error:  # noqa: BLE001 - told to the test
        # In this order: the others fail only because of this one, which has to be heard first.
        answer.send(f"{type(error).__name__}: {error}")
        start.abort()


def _claims(source: Any, pairs: Sequence[Pair], start: Any) -> list[Any]:
    with Guard(source) as guard:
        store = guard.store
        start.wait(PATIENCE)
        return [store.claim(entry, replacing=record) for entry, record in pairs]


def _claims_async(source: Any, pairs: Sequence[Pair], start: Any) -> list[Any]:
    import asyncio

    async def claim_each() -> list[Any]:
        async with AsyncGuard(source) as guard:
            store = guard.store
            start.wait(PATIENCE)
            return [await store.claim(entry, replacing=record) for entry, record in pairs]

    return asyncio.run(claim_each())
