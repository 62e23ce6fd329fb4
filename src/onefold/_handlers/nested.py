"""Deliveries nested in another one's transaction: those that its handler makes on the same connection.

They commit with the outer one, or neither does. So none of them may be running when that transaction ends: later
statements would be committed by themselves, or be lost. In sync code a call ends before its caller continues, and only
a call from another thread is refused. A task of an async handler may outlive it, though. There the nested deliveries of
one handler run one after the other, because a connection has one transaction and one sequence of savepoints; and the
end of the transaction waits for those that were started while the handler ran.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from onefold._concurrency import interrupts
from onefold._concurrency.users_errors import passing_async
from onefold.errors import UsageError

if TYPE_CHECKING:
    import asyncio

    from onefold._model import Address

AWAIT_IT: Final = (
    "Await everything that a handler starts, as asyncio.TaskGroup does. Work that is independent of it needs its "
    "own context: create_task(..., context=contextvars.Context())"
)


class Nest:
    """The deliveries inside one handler, on its transaction."""

    __slots__ = ("_around", "_failed", "_failure", "_given_up", "_over", "_thread", "_turn", "_under_way")

    def __init__(self, around: Address) -> None:
        self._around = around
        self._thread = get_ident()
        # Created with the first nested delivery, which most handlers do not have.
        self._turn: asyncio.Lock | None = None
        # Those that are running, and those that wait for their turn.
        self._under_way = 0
        # Whether the handler has ended, and whether it failed.
        self._over = False
        self._failed = False
        # Whether nested deliveries were still running when the wait for them ended.
        self._given_up = False
        # The error of a nested delivery that failed when the handler could no longer see it.
        self._failure: BaseException | None = None

    def check_thread(self) -> None:
        """Raise `UsageError` in a thread other than the handler's: a connection works for one at a time."""
        if get_ident() != self._thread:
            raise UsageError(
                f"called in a different thread from the handler around it, {self._named()}, whose transaction it would "
                "join. Nothing ran. Call it in the handler's own thread, or outside the transaction: "
                "contextvars.Context().run(...)"
            )

    @passing_async
    async def turn(self, transaction: Any = None) -> AsyncIterator[Any]:
        """Wait until no other delivery runs inside this handler; then yield its transaction.

        A delivery nested in a nested one has a nest of its own.
        """
        from asyncio import Lock

        self.check_thread()
        self._turn = self._turn or Lock()
        self._under_way += 1
        try:
            async with self._turn:
                if self._failed:
                    raise UsageError(f"not run, because the handler around it, {self._named()}, has failed. {AWAIT_IT}")
                yield transaction
        except BaseException as error:
            if self._over:
                self._failure = error
            raise
        finally:
            self._under_way -= 1
        if self._given_up:
            raise self._too_late()

    async def ended(self, error: BaseException | None, store: Any) -> BaseException | None:
        """Wait for the nested deliveries once the handler has ended with this error; return the error to continue with.

        If they have not ended after CLEAN_UP_SECONDS, the store makes sure that nothing is committed.
        """
        import asyncio

        self._over, self._failed = True, error is not None
        if self._turn is None or not self._under_way:
            return error
        before = interrupts.cancellations()
        waiting = asyncio.ensure_future(self._turn.acquire())
        if not await interrupts.ended(waiting):
            interrupts.leave(waiting)
            self._given_up = True
            await _close(store)
        return interrupts.unmasked(self._outcome(error), before)

    def _outcome(self, error: BaseException | None) -> BaseException | None:
        if error is not None and not isinstance(error, Exception):
            return error
        if self._given_up:
            mistake = self._too_late()
            # Not as its cause, which says why a transaction is retried: work that is still running would collide with
            # the new one.
            mistake.__context__ = error
            return mistake
        if error is not None or self._failure is None:
            return error
        if isinstance(self._failure, Exception):
            # As if the handler had awaited it.
            return self._failure
        return UsageError(
            f"{self._named()}: a delivery that its handler had started was cancelled after the handler had ended. "
            f"Nothing was committed. {AWAIT_IT}"
        )

    def _too_late(self) -> UsageError:
        return UsageError(
            f"{self._named()}: a delivery that its handler had started was still running "
            f"{interrupts.CLEAN_UP_SECONDS:g} s after the handler had ended. The connection was closed, and neither "
            f"was committed. {AWAIT_IT}"
        )

    def _named(self) -> str:
        return f"{self._around.operation} [key {self._around.digest}]"


async def _close(store: Any) -> None:
    """Close the connection under work that is still running; first in a way that a library in between notices."""
    import asyncio

    spoiling = asyncio.ensure_future(store.spoil(interrupts.When.AFTER))
    if await interrupts.ended(spoiling):
        interrupts.read(spoiling)
    else:
        interrupts.leave(spoiling)
    store.abandon()
