"""A client for each event loop, opened on first use there and closed with the loop.

A connection of asyncio belongs to the loop that opened it. An async guard may live through several of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

from onefold.stores import _redis_clients as clients
from onefold.stores._redis_async_lines import AsyncLine
from onefold.stores._redis_clients import Opened
from onefold.stores._redis_urls import Settings

# Lines of a process that has forked. Their sockets, and the selectors that watch them, are the parent's still: a child
# must neither use nor close them, and a garbage collector would.
_inherited: Final[list[Any]] = []


class Here(NamedTuple):
    """The line of one loop, and what closes it as the loop ends."""

    line: AsyncLine
    keeper: AsyncGenerator[None, None] | None


class Loops:
    """From the running loop to its line. `source` is the caller's own client, or settings for clients of ours."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._here: dict[asyncio.AbstractEventLoop, Here] = {}
        self._pid = os.getpid()

    async def line(self) -> AsyncLine:
        if self._pid != os.getpid():
            _inherited.append(self._here)
            self._here, self._pid = {}, os.getpid()
        loop = asyncio.get_running_loop()
        here = self._here.get(loop) or await self._open(loop)
        await here.line.begin()
        return here.line

    async def close(self) -> None:
        """Close the client of the running loop. Those of others are closed with their loops."""
        here = self._here.pop(asyncio.get_running_loop(), None)
        if here is not None and here.keeper is not None:
            await here.keeper.aclose()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Here:
        for other in [other for other in self._here if other.is_closed()]:
            del self._here[other]
        if not isinstance(self._source, Settings):
            here = self._here[loop] = Here(clients.async_line(self._source), None)
            return here
        opened = clients.opened(self._source, awaited=True)
        keeper = self._kept(loop, opened)
        here = self._here[loop] = Here(clients.async_line(opened.client), keeper)
        # A loop that ends closes the generators that were begun in it (asyncio.run and Runner do): so it closes us.
        await anext(keeper)
        return here

    async def _kept(self, loop: asyncio.AbstractEventLoop, opened: Opened) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._here.pop(loop, None)
            await opened.aclose()
