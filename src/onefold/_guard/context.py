"""The context of deliveries, once a guard has opened its store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from onefold._concurrency.generators import Flow
from onefold._delivery.steps import Running
from onefold._handlers.nested import Nest
from onefold._heartbeat.async_guards import AsyncHeartbeat
from onefold._heartbeat.sync_guards import Heartbeat
from onefold._model import Address, DoneRecord
from onefold.codecs import Codec
from onefold.current import Current, around, enter, leave, put_back, transaction_around
from onefold.events import Teller


class DeliveryContext:
    """An open store, and everything that its deliveries need: for the drivers of flows, and for `current`."""

    def __init__(
        self,
        store: Any,
        codec: Codec,
        tell: Teller,
        conduct: Callable[..., Any],
        *,
        awaits: bool = False,
        heartbeat: Heartbeat | AsyncHeartbeat | None = None,
        home: object = None,
        transaction: Any = None,
        find_done: Callable[[Address], DoneRecord | None] | None = None,
    ) -> None:
        self.store = store
        # Finds a record that is done without waiting, before a flow is started; None if the store cannot.
        self.find_done = find_done
        # None inside a transaction: there is no claim to keep alive.
        self.heartbeat = heartbeat
        self.joined = heartbeat is None
        self.codec = codec
        self.tell = tell
        # Whether its flows, and so the steps of its handlers, are async.
        self.awaits = awaits
        self.home = store if home is None else home
        self.transaction = transaction
        # The deliveries nested in the running handler, inside a transaction.
        self.nest: Nest | None = None
        self._conduct = conduct

    @property
    def tx(self) -> Any:
        # Read each time: a retried transaction may be on another connection.
        return None if self.transaction is None else self.transaction.tx

    @property
    def transaction_around(self) -> Any:
        """Return our own transaction behind a caller's connection: `within` on the `tx` of a surrounding handler."""
        return None if self.transaction is not None else transaction_around(self.home)[0]

    def conduct(self, flow: Flow[Any]) -> Any:
        return self._conduct(flow, self)

    def enter(self, running: Running) -> Current | None:
        entry = running.entry
        if entry is None:
            return None
        if self.heartbeat is None:
            self.nest = Nest(entry.address)
            return enter(entry, self, None, self.nest)
        # Only a claim has a beat: there is none in a transaction, in seen mode, or if the store is down.
        return enter(entry, self, self.heartbeat.find(entry.token))

    around = staticmethod(around)
    leave = staticmethod(leave)
    put_back = staticmethod(put_back)

    def close(self) -> None:
        """Stop the heartbeat; the owner of the store closes it."""
        if self.heartbeat is not None:
            self.heartbeat.close()

    async def aclose(self) -> None:
        """Stop the heartbeat of an async guard, and wait for what it has begun."""
        if isinstance(self.heartbeat, AsyncHeartbeat):
            await self.heartbeat.aclose()


class Opened(NamedTuple):
    """The stores that a guard has opened, and whether it has to close them."""

    context: DeliveryContext
    ours: bool
    # The store given as `migrate_from`, if there is one.
    old: Any = None
    old_is_ours: bool = False

    def to_close(self) -> list[Any]:
        """Return the stores that were opened here rather than passed in, and that can be closed."""
        opened = ((self.context.store, self.ours), (self.old, self.old_is_ours))
        return [store for store, ours in opened if ours and (hasattr(store, "close") or hasattr(store, "aclose"))]

    def close(self) -> None:
        """Stop the heartbeat, and close the stores that are ours."""
        self.context.close()
        for store in self.to_close():
            store.close()

    async def aclose(self) -> None:
        """Stop the heartbeat of an async guard, and close the stores that are ours, cancelled or not."""
        try:
            await self.context.aclose()
        finally:
            for store in self.to_close():
                await store.aclose()


class StoreSlot(NamedTuple):
    """The place of a guard's store: its source, the opened stores, and whether the guard is closed."""

    source: Any
    migrate_from: Any = None
    opened: Opened | None = None
    closed: bool = False
