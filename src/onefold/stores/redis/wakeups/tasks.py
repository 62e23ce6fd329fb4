"""Listen for the ends of records in tasks, for async stores."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onefold._model import Address
from onefold.stores.redis import wakeups
from onefold.stores.redis.async_sender import AsyncSender
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.records import packed
from onefold.stores.redis.wakeups import Channels, Listening, new_connection


class AsyncListener(Listening):
    """Listens in tasks of one event loop, one for each server."""

    def __init__(self, sender: AsyncSender, where: str, keys: Keys) -> None:
        super().__init__(where, keys)
        self._sender = sender
        self._opening = asyncio.Lock()

    async def listen(self, address: Address) -> bool:
        """Subscribe to the end of a record, as `Listener` does."""
        if self._is_refused:
            return False
        channel = self._keys.of(address)
        try:
            async with asyncio.timeout(wakeups.SUBSCRIBE_SECONDS):
                subscription = await self._subscription(self._sender.node_of(channel))
                return await subscription.subscribe(channel, address)
        except Exception as error:  # noqa: BLE001 - whatever it is, looking by itself is the answer
            return self._failed(error)

    async def close(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, {}
        for subscription in subscriptions.values():
            await subscription.close()

    async def _subscription(self, node: Any) -> AsyncSubscription:
        name = getattr(node, "name", None) or id(node)
        async with self._opening:
            found = self._subscriptions.get(name)
            if found is None or found.is_over:
                connection = new_connection(node)
                await connection.connect()
                found = AsyncSubscription(connection, self._sender.errors, self._refused)
                self._subscriptions[name] = found
            return found


class AsyncSubscription:
    """One connection to one server, and the task that reads it."""

    def __init__(self, connection: Any, errors: Any, refused: Callable[[Exception], None]) -> None:
        self._connection, self._errors, self._refused = connection, errors, refused
        self._channels = Channels()
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._loop = asyncio.get_running_loop()
        # It belongs to no delivery.
        self._task = self._loop.create_task(self._read(), context=contextvars.Context())

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def subscribe(self, channel: bytes, address: Address) -> bool:
        confirmed = self._confirmed.setdefault(channel, asyncio.Event())
        commands = self._channels.want(channel, address)
        if not any(channel in command for command in commands):
            confirmed.set()
        if commands:
            await self._connection.send_packed_command(packed(commands))
        await confirmed.wait()
        return not self.is_over

    def forget(self, channel: bytes) -> None:
        self._channels.forget(channel)
        self._confirmed.pop(channel, None)
        if not self._channels.wanted:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.call_later, wakeups.IDLE_SECONDS, self._end_if_idle)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    def _end_if_idle(self) -> None:
        if not self._channels.wanted:
            self._task.cancel()

    async def _read(self) -> None:
        try:
            while True:
                reply = await self._connection.read_response(disable_decoding=True)
                confirmed = self._confirmed.get(self._channels.heard(reply) or b"")
                if confirmed is not None:
                    confirmed.set()
        except self._errors.ResponseError as error:
            self._refused(error)
        except Exception as error:  # noqa: BLE001 - the connection is lost: whoever waits may open another
            logging.getLogger("onefold").debug("the connection for wake-ups is lost: %s", error)
        finally:
            self._channels.lost()
            for confirmed in self._confirmed.values():
                confirmed.set()
            with suppress(Exception):
                await self._connection.disconnect(nowait=True)
