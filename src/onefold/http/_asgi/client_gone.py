"""Notice that the client of a stream has disconnected, and bound how long the stream continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

# A stream whose client has disconnected may still reach its end, so that a retry gets its response. It may also be
# endless: then it is ended after this time, or after this many unread bytes.
STREAM_SECONDS: Final = 60.0
STREAM_BYTES: Final = 16 << 20


class ClientGone(OSError):
    """Nobody reads this stream any more: raised in the application that produces it."""

    def __init__(self) -> None:
        super().__init__("the client has disconnected, and the stream has not ended")


def has_had_its_time(client_gone_at: float, unread: int) -> bool:
    """Return whether a stream with this many unread bytes since its client disconnected has to end now."""
    return unread > STREAM_BYTES or time.monotonic() > client_gone_at + STREAM_SECONDS


class DisconnectMonitor:
    """Waits for the client of a stream to disconnect, and calls `give_up` when the stream has had its time."""

    def __init__(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], give_up: Callable[[], None]) -> None:
        self._receive = receive
        self._give_up = give_up
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self.client_gone = False

    def begin(self) -> None:
        """Start watching the client: a stream has begun."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._monitor())
            if self.client_gone:
                self.gone()

    def gone(self) -> None:
        """Note that the client has disconnected, as reported by a server in another way."""
        self.client_gone = True
        if self._task is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STREAM_SECONDS, self._give_up)

    def unread(self, size: int) -> None:
        """Count unread bytes."""
        self._unread += size
        if self._unread > STREAM_BYTES:
            self._give_up()

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _monitor(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception:  # noqa: BLE001 - an outer layer has failed, and reports it to the server itself
            return
        self.gone()
