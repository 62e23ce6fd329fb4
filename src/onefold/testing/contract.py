"""`StoreContract`: the definition of a store. Anything that passes all of it is one.

Inherit from it, define how your store is opened, and pytest collects the promises:

    class TestMyStore(StoreContract):
        def open_store(self) -> MyStore:
            return MyStore(...)

It needs pytest only to be run. `AsyncStoreContract` is the same contract for async stores: the promises are written
once, in `onefold.testing.promises`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from onefold.stores.base import AsyncStore, Store
from onefold.testing.promises._case import Case
from onefold.testing.promises._twice import Blocking, EveryPower
from onefold.testing.promises.annotations import Annotations
from onefold.testing.promises.claims import Claims, Marks, TakeOvers
from onefold.testing.promises.clocks import Durations, Expirations, Purges
from onefold.testing.promises.contents import Addresses, Fields
from onefold.testing.promises.owners import Extending, Finishing, Releasing, Revisions, Strangers
from onefold.testing.promises.powers import Batches, Browsing
from onefold.testing.promises.races import ProcessRaces, Races

T = TypeVar("T")

# Far more than a race needs; it bounds how long a hanging store can block the test.
PATIENCE = 120.0


class Promises(
    Claims,
    TakeOvers,
    Marks,
    Finishing,
    Extending,
    Releasing,
    Strangers,
    Revisions,
    Addresses,
    Fields,
    Durations,
    Expirations,
    Purges,
    Races,
    ProcessRaces,
    Batches,
    Annotations,
    Browsing,
    Case,
):
    """Every promise, for sync and async.

    Besides `open_store`, an author may define, as attributes or methods of the test class:

    - `pass_time(seconds)`: let the store's clock advance. By default it sleeps; move the clock if you can.
    - `unit`: the contract's short duration, in seconds; some fifteen promises wait for two of them. Take more than
      0.1 if the store's clock ticks more coarsely.
    - `process_source()`: how another process opens the same records: anything that a `Guard` takes as its store and
      that can be pickled, such as a URL or a function of a module. None (the default): the store is not shared.
    - `expires_by_itself`: True if expired records vanish without a purge, so that it may count fewer.
    - `racers`, `rounds`: how many race, and how often.
    """


class StoreContract(Promises):
    """The contract of a sync store."""

    def open_store(self) -> Store:
        """Return a store without records, for one test. It is closed afterwards if it has a `close`."""
        raise NotImplementedError(f"{type(self).__name__} has to say how its store is opened: def open_store(self)")

    def _open(self) -> EveryPower:
        self._opened = self.open_store()
        return cast("EveryPower", self._opened)

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if hasattr(opened, "close"):
            opened.close()

    def _race(self, asks: Sequence[Callable[[Any], Any]]) -> list[Any]:
        store, start = self.once, threading.Barrier(len(asks))

        def ask(question: Callable[[Any], Any]) -> Any:
            start.wait(PATIENCE)
            return question(store)

        with ThreadPoolExecutor(len(asks)) as threads:
            return list(threads.map(ask, asks, timeout=PATIENCE))


class AsyncStoreContract(Promises):
    """The contract of an async store. It races with the tasks of one event loop instead of threads."""

    _is_async = True
    _runner: asyncio.Runner | None = None

    def open_store(self) -> AsyncStore | Awaitable[AsyncStore]:
        """Return an empty store, for one test; may be `async def`. It is closed afterwards if it has an `aclose`."""
        raise NotImplementedError(f"{type(self).__name__} has to say how its store is opened: def open_store(self)")

    def teardown_method(self) -> None:
        try:
            super().teardown_method()
        finally:
            if self._runner is not None:
                self._runner.close()
                self._runner = None

    def _open(self) -> EveryPower:
        # With a factory the runner leaves the thread's own event loop alone.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._opened = self._runner.run(self._open_async())
        return Blocking(self._opened, self._runner)

    async def _open_async(self) -> AsyncStore:
        opened = self.open_store()
        return await opened if inspect.isawaitable(opened) else opened

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if hasattr(opened, "aclose"):
            self._run(opened.aclose())

    def _race(self, asks: Sequence[Callable[[Any], Any]]) -> list[Any]:
        assert self.store is not None
        opened = self._opened

        async def race() -> list[Any]:
            return await asyncio.wait_for(asyncio.gather(*(ask(opened) for ask in asks)), PATIENCE)

        return self._run(race())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._runner is not None
        return self._runner.run(coroutine)
