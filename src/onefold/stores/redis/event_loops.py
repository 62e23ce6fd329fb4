"""Keep a client for each event loop, opened on first use there and closed with the loop.

An asyncio connection belongs to the loop that opened it. An async guard may outlive several loops.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

from onefold._model import Address
from onefold.stores.redis import clients
from onefold.stores.redis.async_sender import AsyncSender
from onefold.stores.redis.clients import Opened
from onefold.stores.redis.connections.reserved import AsyncReservedSender
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.urls import Settings
from onefold.stores.redis.wakeups.tasks import AsyncListener

# Senders of a process that has forked. Their sockets, and the selectors that watch them, are still the parent's: a
# child must neither use nor close them, and the garbage collector would close them.
_inherited: Final[list[Any]] = []


class Here(NamedTuple):
    """The senders of one loop, and the generator that closes them when the loop ends."""

    sender: AsyncSender
    renewals: AsyncReservedSender
    listener: AsyncListener
    cache: AsyncGenerator[None, None]


class Loops:
    """Maps the running loop to its sender. `source` is the caller's own client, or settings for our clients."""

    def __init__(self, source: Any, where: str, keys: Keys) -> None:
        self._source = source
        self._where = where
        self._keys = keys
        self._here: dict[asyncio.AbstractEventLoop, Here] = {}
        self._pid = os.getpid()

    def known(self) -> Here | None:
        """Return what was opened in this loop, without waiting for anything."""
        return self._here.get(asyncio.get_running_loop()) if self._pid == os.getpid() else None

    async def sender(self) -> AsyncSender:
        here = await self._found()
        await here.sender.begin()
        return here.sender

    async def renewals(self) -> AsyncReservedSender:
        """Return the sender that renews claims; its connections are open."""
        renewals = (await self._found()).renewals
        await renewals.hold()
        return renewals

    def known_renewals(self) -> AsyncReservedSender | None:
        """Return the sender for renewals if it was opened in this loop. Send nothing."""
        here = self.known()
        return here.renewals if here is not None and here.renewals.is_held else None

    async def listener(self) -> AsyncListener:
        """Return the listener for the ends of records; it has opened nothing yet, unless somebody waits."""
        here = await self._found()
        await here.sender.begin()
        return here.listener

    def unlisten(self, address: Address) -> None:
        """Want to hear of this record no longer, in whatever loop."""
        if self._pid == os.getpid():
            for here in list(self._here.values()):
                here.listener.unlisten(address)

    async def _found(self) -> Here:
        if self._pid != os.getpid():
            _inherited.append(self._here)
            self._here, self._pid = {}, os.getpid()
        loop = asyncio.get_running_loop()
        return self._here.get(loop) or await self._open(loop)

    async def close(self) -> None:
        """Close the client of the running loop. Those of others are closed with their loops."""
        here = self._here.pop(asyncio.get_running_loop(), None)
        if here is not None:
            await here.cache.aclose()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Here:
        for other in [other for other in self._here if other.is_closed()]:
            del self._here[other]
        opened = clients.opened(self._source, is_async=True) if isinstance(self._source, Settings) else None
        client = self._source if opened is None else opened.client
        renewals = clients.async_reserved_sender(client)
        sender = clients.async_sender(client, ours=opened is not None)
        listener = AsyncListener(sender, self._where, self._keys)
        cache = self._kept(loop, sender, renewals, listener, opened)
        here = self._here[loop] = Here(sender, renewals, listener, cache)
        # A loop that ends closes the async generators started in it (asyncio.run and Runner do), and so this one.
        await anext(cache)
        return here

    async def _kept(
        self,
        loop: asyncio.AbstractEventLoop,
        sender: AsyncSender,
        renewals: AsyncReservedSender,
        listener: AsyncListener,
        opened: Opened | None,
    ) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._here.pop(loop, None)
            await listener.close()
            await renewals.close()
            await sender.close()
            if opened is not None:
                await opened.aclose()
