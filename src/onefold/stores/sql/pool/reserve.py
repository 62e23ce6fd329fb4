"""End claims while handlers hold all connections, on the connection that is reserved for renewals.

An ending waits for the pool only briefly, because the claim's lease is running. On the reserved connection it waits for
no row, because all renewals would wait behind it: a record that another transaction holds is an error at once, and the
operation is retried while the lease lasts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

from onefold._model import Claim, Close, Ending
from onefold.durations import as_text
from onefold.errors import StoreUnavailable
from onefold.stores.sql.connection import AsyncConnection, AsyncConnectionSource
from onefold.stores.sql.dialect import Dialect, Reply, SqlFlow, SqlRequest
from onefold.stores.sql.locked import RowHeld
from onefold.stores.sql.records import of_claim, of_notes

# An ending waits for a connection of the pool for an eighth of its lease: most are returned much sooner, and the lease
# has to last for the rest.
MOMENTS_PER_LEASE: Final = 8


class Soon:
    """A pool for ending these claims, with a short bound on the wait for a connection."""

    def __init__(self, pool: AsyncConnectionSource, claims: Sequence[Claim], *, many: bool = False) -> None:
        self._pool = pool
        self._many = many
        # An empty batch has no lease, and ends nothing.
        self._seconds = min((claim.lease for claim in claims), default=1.0) / MOMENTS_PER_LEASE

    def acquire(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Lend a connection that already holds a driver's connection."""
        soon = getattr(self._pool, "soon", None)
        return self._lent() if soon is None else soon(self._seconds)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection]:
        import asyncio

        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._seconds) as bound:
                    conn = await held.enter_async_context(self._pool.acquire())
                    take = getattr(conn, "take", None)
                    if take is not None:
                        # Otherwise its first statement would wait for one, without this bound.
                        await take(many=self._many)
            except TimeoutError as error:
                if not bound.expired():
                    raise
                raise StoreUnavailable.unreached(gave_none(self._seconds)) from error
            yield conn

    async def drop_idle(self) -> None:
        await self._pool.drop_idle()


def gave_none(seconds: float) -> str:
    return (
        f"the pool gave no connection within {as_text(round(seconds, 3))}, an eighth of the lease. Nothing ran. Keep "
        "transactions short, or make the pool larger"
    )


def extended(sql: Dialect, claim: Claim, notes: bytes | None) -> SqlFlow[bool]:
    """Renew a claim and keep its notes, without waiting for a row lock."""
    reply: Reply = yield from sql.at_once(SqlRequest(sql.renew, of_claim(claim) | of_notes(notes)), claim)
    return reply.written == 1


def closed(sql: Dialect, close: Close) -> SqlFlow[bool]:
    """End a claim without waiting for a row lock."""
    reply: Reply = yield from sql.at_once(sql.closing(close.claim, close.by), close.claim)
    if reply.written == 1 or isinstance(close.by, Ending):
        return reply.written == 1
    return (yield from sql.read(close.claim.address)) is None


def all_closed(sql: Dialect, closes: Sequence[Close]) -> SqlFlow[list[bool]]:
    """End claims one by one, so that a locked row does not stop the others; then raise the last `RowHeld`."""
    answers: list[bool] = []
    failure: RowHeld | None = None
    for close in closes:
        try:
            answers.append((yield from closed(sql, close)))
        except RowHeld as error:
            failure = error
    if failure is not None:
        raise failure
    return answers
