"""What ends a claim while handlers hold all connections: it goes to the one that is reserved for renewals.

It waits for the pool for a moment only, because the claim's lease runs. And on the reserved connection it waits for
nobody's row, because all renewals would wait behind it: a record that another transaction holds is an error at once,
and the operation is asked for again while the lease lasts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from onefold._model import Claim, Close, Ending
from onefold.durations import as_text
from onefold.errors import StoreUnavailable
from onefold.stores.sql.connection import AsyncConnection, AsyncConnectionSource
from onefold.stores.sql.dialect import Dialect, Reply, SqlFlow, SqlRequest
from onefold.stores.sql.locked import RowHeld
from onefold.stores.sql.records import of_claim, of_notes

# What ends a claim waits for a connection of the pool for an eighth of its lease: most are given back much sooner, and
# the lease has to last for the rest.
MOMENTS_PER_LEASE: Final = 8


class Soon:
    """A pool, for what ends these claims: it is waited for no longer than a moment."""

    def __init__(self, pool: AsyncConnectionSource, claims: Sequence[Claim], *, many: bool = False) -> None:
        self._pool = pool
        self._claims = claims
        self._many = many
        # An empty batch has no lease, and ends nothing.
        self._seconds = min((claim.lease for claim in claims), default=1.0) / MOMENTS_PER_LEASE

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[AsyncConnection]:
        """Lend a connection that has its connection already."""
        import asyncio

        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._seconds) as bound:
                    conn = await held.enter_async_context(self._pool.acquire())
                    take = getattr(conn, "take", None)
                    if take is not None:
                        # It would wait for it with its first statement.
                        await take(many=self._many)
            except TimeoutError as error:
                if not bound.expired():
                    raise
                raise StoreUnavailable.unreached(gave_none(self._seconds)) from error
            yield conn

    def for_one(self) -> Soon:
        """Return the same for one statement at a time."""
        return Soon(self._pool, self._claims)

    async def drop_idle(self) -> None:
        await self._pool.drop_idle()


def gave_none(seconds: float) -> str:
    return (
        f"the pool gave no connection within {as_text(round(seconds, 3))}, an eighth of the lease. Nothing ran. Keep "
        "transactions short, or make the pool larger"
    )


def extended(sql: Dialect, claim: Claim, notes: bytes | None) -> SqlFlow[bool]:
    """Renew a claim, and keep its notes; wait for nobody's row."""
    reply: Reply = yield from sql.at_once(SqlRequest(sql.renew, of_claim(claim) | of_notes(notes)), claim)
    return reply.written == 1


def closed(sql: Dialect, close: Close) -> SqlFlow[bool]:
    """End a claim; wait for nobody's row."""
    reply: Reply = yield from sql.at_once(sql.closing(close.claim, close.by), close.claim)
    if reply.written == 1 or isinstance(close.by, Ending):
        return reply.written == 1
    return (yield from sql.read(close.claim.address)) is None


def all_closed(sql: Dialect, closes: Sequence[Close]) -> SqlFlow[list[bool]]:
    """End claims one by one, so that one whose row is held keeps no other from its end; then raise what was raised."""
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
