"""`use`: swap the store of a guard that was bound at import, for one test."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from onefold import AsyncGuard, Guard
from onefold.errors import UsageError
from onefold.stores.sources import AsyncStoreSource, StoreSource


def use(guard: Guard | AsyncGuard, source: StoreSource | AsyncStoreSource = "memory:") -> Swap:
    """Swap the store of a guard: `with use(guard, "memory:") as store:`.

    `source` is anything that the guard itself takes: a URL, a store, or a function that returns one. The guard's own
    store is neither opened, closed nor touched, and is restored afterwards, even after an exception. A guard that is
    closed inside (by an application that shuts down, say) is open again afterwards. It can be nested.

    For an `AsyncGuard` there is also `async with`, for a store that takes time to close.
    """
    return Swap(guard, source)


class Swap:
    """A store that is lent to a guard. Created by `use`."""

    def __init__(self, guard: Guard | AsyncGuard, source: Any) -> None:
        self._guard = guard
        self._source = source
        # One for each `with` that we are inside.
        self._before: list[Any] = []

    def __enter__(self) -> Any:
        self._before.append(self._guard._swap(self._source))
        try:
            return self._guard.store
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *_: object) -> None:
        lent = self._put_back()
        if lent is None:
            return
        if not isinstance(self._guard, AsyncGuard):
            lent.close()
            return
        lent.context.close()
        for store in lent.to_close():
            _close_at_once(store)

    async def __aenter__(self) -> Any:
        if not isinstance(self._guard, AsyncGuard):
            raise UsageError("a Guard is not async: write `with use(...)`, without async")
        return self.__enter__()

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        lent = self._put_back()
        if lent is not None:
            await lent.aclose()

    def _put_back(self) -> Any:
        """Restore the guard; return the stores that it had opened meanwhile, if any."""
        return self._guard._put(self._before.pop()).opened


def _close_at_once(store: Any) -> None:
    """Close an async store without awaiting, if it has nothing to wait for."""
    closing = store.aclose()
    try:
        closing.send(None)
    except StopIteration:
        return
    closing.close()
    raise UsageError(f"{type(store).__name__} takes time to close: write `async with use(...)`")
