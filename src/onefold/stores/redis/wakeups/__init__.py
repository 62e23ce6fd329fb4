"""Hear of the ends of records, for those who wait for them in this process.

The key of a record is the name of its channel. Whoever waits subscribes to it on the server that has the record, and
that is the mark by which the scripts of the owner know that somebody waits: only then they publish, in the call that
ends the record. A mark disappears with its connection, so that nobody has to remove it.

One connection for each server, outside the client's pools, is opened when somebody waits, and closed when nobody has
waited for a while. A message that is lost costs time: waiters also look by themselves.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

from onefold._concurrency import waiters
from onefold._model import Address
from onefold.stores.redis.errors import WAKEUP_PERMISSIONS
from onefold.stores.redis.keys import Keys
from onefold.stores.redis.records import Command

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


class Listening:
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


def new_connection(node: Any, timeout: float | None = None) -> Any:
    """Return a connection for messages, not opened yet, with the settings of a pool or an async cluster node.

    It is silent for as long as nothing ends: `timeout` is for reads that follow only when there is something to read,
    and for the greeting. RESP2, in which messages are replies; notifications of maintenance need a newer one.
    """
    options = {name: value for name, value in node.connection_kwargs.items() if "maint" not in name}
    options |= {"protocol": 2, "socket_timeout": timeout, "health_check_interval": 0}
    if options.get("socket_connect_timeout") is None:
        options["socket_connect_timeout"] = SUBSCRIBE_SECONDS
    return node.connection_class(**options)
