"""Hear of the ends of records, for those who wait for them in this process.

The key of a record is the name of its channel. Whoever waits subscribes to it on the server that has the record, and
that is the mark by which the scripts of the owner know that somebody waits: only then they publish, in the call that
ends the record. A mark disappears with its connection, so that nobody has to remove it.

One connection for each server, outside the client's pools, is opened when somebody waits, and closed when nobody has
waited for a while. A message that is lost costs time: waiters also look by themselves.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from onefold._concurrency import waiters
from onefold._concurrency.forks import set_lock
from onefold._model import Address
from onefold.stores.redis.async_sender import AsyncSender
from onefold.stores.redis.errors import WAKEUP_PERMISSIONS
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.records import Command, packed
from onefold.stores.redis.sender import Sender

# How long a waiter waits until it is subscribed. It could have looked several times meanwhile.
SUBSCRIBE_SECONDS: Final = 1.0

# How long a connection stays open while nobody waits, and how often a thread looks whether somebody does.
IDLE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0

REFUSED: Final = (
    "%s: this user may not subscribe (%s), so whoever waits for another process looks again and again. Allow it with "
    "ACL SETUSER and &%s* %s, or switch it off with ?wakeups=false"
)


class Channels:
    """The channels of one connection: who wants which, what has to be sent for it, and what a reply means. Pure."""

    def __init__(self) -> None:
        self.wanted: dict[bytes, Address] = {}
        # Of these the server has confirmed, or has been asked for, a subscription.
        self._subscribed: set[bytes] = set()

    def want(self, channel: bytes, address: Address) -> list[Command]:
        """Return the commands that subscribe to a channel, and leave those that nobody wants any more."""
        self.wanted[channel] = address
        left = tuple(self._subscribed - self.wanted.keys())
        self._subscribed.difference_update(left)
        commands: list[Command] = [(b"UNSUBSCRIBE", *left)] if left else []
        if channel not in self._subscribed:
            self._subscribed.add(channel)
            commands.append((b"SUBSCRIBE", channel))
        return commands

    def forget(self, channel: bytes) -> None:
        """Want it no longer. The server is told with the next subscription, or by the end of the connection."""
        self.wanted.pop(channel, None)

    def heard(self, reply: Any) -> bytes | None:
        """Return the channel that is confirmed; wake those who wait for one about which there is a message."""
        what, channel = bytes(reply[0]), reply[1]
        if what == b"message" and channel in self.wanted:
            waiters.wake(self.wanted[channel])
        return channel if what == b"subscribe" else None

    def lost(self) -> None:
        """Tell all who wait that nobody tells them any more."""
        wanted, self.wanted = self.wanted, {}
        for address in wanted.values():
            waiters.nobody_tells(address)


class _Listening:
    """What both listeners share: one subscription for each server, unless the server refuses."""

    def __init__(self, where: str, keys: Keys) -> None:
        self._where = where
        self._keys = keys
        self._subscriptions: dict[object, Any] = {}
        self._is_refused = False
        self._pid = os.getpid()

    def unlisten(self, address: Address) -> None:
        channel = self._keys.of(address)
        for subscription in list(self._subscriptions.values()):
            subscription.forget(channel)

    def _leave_the_parents(self) -> None:
        if self._pid != os.getpid():
            self._subscriptions, self._pid = {}, os.getpid()

    def _refused(self, error: Exception) -> None:
        """Ask no more, and say so once."""
        if not self._is_refused:
            self._is_refused = True
            prefix = self._keys.prefix.decode()
            logging.getLogger("onefold").warning(REFUSED, self._where, error, prefix, WAKEUP_PERMISSIONS)

    def _failed(self, error: Exception) -> bool:
        # The waiter looks by itself; if the server is down, that fails, and says why.
        logging.getLogger("onefold").debug("%s: nobody hears of the ends of records: %s", self._where, error)
        return False


class Listener(_Listening):
    """Listens in threads of its own, one for each server."""

    _opening: threading.Lock

    def __init__(self, sender: Sender, where: str, keys: Keys) -> None:
        super().__init__(where, keys)
        self._sender = sender
        set_lock(self, "_opening")

    def listen(self, address: Address) -> bool:
        """Subscribe to the end of a record. Return False if nobody will tell of it."""
        self._leave_the_parents()
        if self._is_refused:
            return False
        channel = self._keys.of(address)
        try:
            pool = self._sender._pool(self._sender.node_of(channel))
            return self._subscription(pool).subscribe(channel, address)
        except Exception as error:  # noqa: BLE001 - whatever it is, looking by itself is the answer
            return self._failed(error)

    def close(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, {}
        if self._pid == os.getpid():
            for subscription in subscriptions.values():
                subscription.close()

    def _subscription(self, pool: Any) -> Subscription:
        with self._opening:
            found = self._subscriptions.get(pool)
            if found is None or found.is_over:
                errors = self._sender.errors
                found = self._subscriptions[pool] = Subscription(_connection(pool), errors, self._refused)
            return found


class Subscription:
    """One connection to one server, and the thread that reads it."""

    _sending: threading.Lock

    def __init__(self, connection: Any, errors: Any, refused: Callable[[Exception], None]) -> None:
        connection.connect()
        self.is_over = False
        self._connection, self._errors, self._refused = connection, errors, refused
        self._channels = Channels()
        self._confirmed: dict[bytes, threading.Event] = {}
        set_lock(self, "_sending")
        self._thread = threading.Thread(target=self._read, name="onefold-wakeups", daemon=True)
        self._thread.start()

    def subscribe(self, channel: bytes, address: Address) -> bool:
        with self._sending:
            if self.is_over:
                return False
            confirmed = self._confirmed.setdefault(channel, threading.Event())
            commands = self._channels.want(channel, address)
            if not any(channel in command for command in commands):
                confirmed.set()
            if commands:
                self._connection.send_packed_command((packed(commands),))
        return confirmed.wait(SUBSCRIBE_SECONDS) and not self.is_over

    def forget(self, channel: bytes) -> None:
        self._channels.forget(channel)
        self._confirmed.pop(channel, None)

    def close(self) -> None:
        with self._sending:
            was_over, self.is_over = self.is_over, True
            if not was_over:
                # Its reply wakes the thread.
                with suppress(Exception):
                    self._connection.send_packed_command((packed([(b"UNSUBSCRIBE",)]),))
        if self._thread is not threading.current_thread():
            self._thread.join(LOOK_SECONDS)

    def _read(self) -> None:
        idle = 0.0
        try:
            while not self.is_over:
                if self._connection.can_read(timeout=LOOK_SECONDS):
                    self._hear(self._connection.read_response(disable_decoding=True))
                    continue
                idle = 0.0 if self._channels.wanted else idle + LOOK_SECONDS
                if idle >= IDLE_SECONDS:
                    self._end_if_idle()
        except self._errors.ResponseError as error:
            self._refused(error)
        except Exception as error:  # noqa: BLE001 - the connection is lost: whoever waits may open another
            logging.getLogger("onefold").debug("the connection for wake-ups is lost: %s", error)
        finally:
            self._end()

    def _hear(self, reply: Any) -> None:
        confirmed = self._confirmed.get(self._channels.heard(reply) or b"")
        if confirmed is not None:
            confirmed.set()

    def _end_if_idle(self) -> None:
        with self._sending:
            self.is_over = not self._channels.wanted

    def _end(self) -> None:
        with self._sending:
            self.is_over = True
        with suppress(Exception):
            self._connection.disconnect()
        for confirmed in list(self._confirmed.values()):
            confirmed.set()
        self._channels.lost()


class AsyncListener(_Listening):
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
            async with asyncio.timeout(SUBSCRIBE_SECONDS):
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
                connection = _connection(node)
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
                self._loop.call_soon_threadsafe(self._loop.call_later, IDLE_SECONDS, self._end_if_idle)

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


def _connection(node: Any) -> Any:
    """Return a connection for messages, not opened yet, with the settings of a pool or an async cluster node.

    It is silent for as long as nothing ends. RESP2, in which messages are replies; notifications of maintenance need a
    newer one.
    """
    options = {name: value for name, value in node.connection_kwargs.items() if "maint" not in name}
    options |= {"protocol": 2, "socket_timeout": None, "health_check_interval": 0}
    if options.get("socket_connect_timeout") is None:
        options["socket_connect_timeout"] = SUBSCRIBE_SECONDS
    return node.connection_class(**options)
