"""Listen for the ends of records in threads, for sync stores."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onefold._concurrency.forks import set_lock
from onefold._concurrency.waiters import acquired
from onefold._model import Address
from onefold.stores.redis import wakeups
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.records import packed
from onefold.stores.redis.sender import Sender
from onefold.stores.redis.wakeups import Channels, Listening, new_connection


class Listener(Listening):
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
        # A server that accepts connections and then is silent costs each of them a second, one after the other.
        with acquired(self._opening, wakeups.SUBSCRIBE_SECONDS):
            found = self._subscriptions.get(pool)
            if found is None or found.is_over:
                connection = new_connection(pool, wakeups.SUBSCRIBE_SECONDS)
                found = self._subscriptions[pool] = Subscription(connection, self._sender.errors, self._refused)
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
        return confirmed.wait(wakeups.SUBSCRIBE_SECONDS) and not self.is_over

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
            self._thread.join(wakeups.LOOK_SECONDS)

    def _read(self) -> None:
        idle = 0.0
        try:
            while not self.is_over:
                if self._connection.can_read(timeout=wakeups.LOOK_SECONDS):
                    self._hear(self._connection.read_response(disable_decoding=True))
                    continue
                idle = 0.0 if self._channels.wanted else idle + wakeups.LOOK_SECONDS
                if idle >= wakeups.IDLE_SECONDS:
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
