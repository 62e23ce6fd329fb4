"""Hear of the ends of records, for those who wait for them in this process. Asked for by `?notify=true`.

NOTIFY takes a lock on the whole database as its transaction commits, so the statement that ends a record sends one only
if somebody waits. Whoever waits marks the record by a shared advisory lock in the session that listens; the statement
tries to take the same lock alone, which fails if the record is marked, and otherwise ends with the statement. So there
is no table of marks to be written, and a mark disappears with its session.

Only statements on connections of the store do so, each in a transaction of its own: nothing here is ever sent inside
a transaction of a handler's or a caller's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from onefold._concurrency import waiters
from onefold._concurrency.generators import Flow
from onefold._model import Address, Claim, Ending, Released
from onefold.stores.postgres.dialect import Postgres
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest

CHANNEL: Final = "onefold_wakeups"

LISTEN: Final = f"LISTEN {CHANNEL}"
MARK: Final = "SELECT pg_try_advisory_lock_shared({})"
# Any number of them in one round trip.
UNMARK: Final = "SELECT count(pg_advisory_unlock_shared(mark)) FROM unnest('{{{}}}'::bigint[]) AS mark"

# Both names of the process that serves a session are the same, unless a pooler is in between.
PROCESS: Final = "SELECT pg_backend_pid()"

# How long a waiter waits until the record is marked. It could have looked several times meanwhile.
MARK_SECONDS: Final = 1.0

# How long the connection stays open while nobody waits, and how often a thread looks whether somebody does.
IDLE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0

TELLING: Final = (
    f" RETURNING CASE WHEN NOT pg_try_advisory_xact_lock(:mark::bigint) "
    f"THEN pg_notify('{CHANNEL}', (:mark::bigint)::text) END"
)

POOLED: Final = (
    "%s: notify=true needs a direct connection, and a pooler is in between. So whoever waits for another process looks "
    "again and again. Name the server itself, or leave the option out"
)


def mark_of(address: Address) -> int:
    """Return the number of a record's advisory lock. Another record with the same one would cost it a look."""
    return int.from_bytes(hashlib.blake2b(address.packed, digest_size=8, person=b"onefold").digest(), signed=True)


class NotifyingPostgres(Postgres):
    """The statements of a store that tells of the ends of its records."""

    def closing(self, claim: Claim, by: Ending | Released | None) -> SqlRequest:
        request = super().closing(claim, by)
        values = request.values | {"mark": mark_of(claim.address)}
        return replace(request, statement=request.statement + TELLING, values=values)

    def at_once(self, request: SqlRequest, claim: Claim) -> SqlFlow[Reply]:
        # The reserved connection must not wait for anything: those who wait look by themselves.
        values = {name: value for name, value in request.values.items() if name != "mark"}
        plain = replace(request, statement=request.statement.removesuffix(TELLING), values=values)
        return super().at_once(plain, claim)


NOTIFYING: Final = NotifyingPostgres()


class Marks:
    """The marks of one session: which are wanted, which it holds, and what a message means. Pure."""

    def __init__(self) -> None:
        self.wanted: dict[int, Address] = {}
        self._held: set[int] = set()
        # To be removed: nobody wants them any more, or the statement that sets them was interrupted.
        self._left: set[int] = set()

    def set(self, address: Address, ask: Callable[[str], Any]) -> Flow[bool]:
        """Mark a record, and remove the marks that nobody wants; return whether it is marked.

        `ask` returns the only value of a statement or, if async, an awaitable of it. Each mark that the session may
        hold stays in one of the sets, wherever that is interrupted: the server has room for a few thousand of all.
        """
        mark = mark_of(address)
        self.wanted[mark] = address
        self._left |= self._held - self.wanted.keys()
        self._held -= self._left
        left = list(self._left)
        if left:
            yield partial(ask, UNMARK.format(",".join(map(str, left))))
            self._left.difference_update(left)
        if mark not in self._held:
            self._left.add(mark)
            granted = yield partial(ask, MARK.format(mark))
            self._left.discard(mark)
            if not granted:
                return False
            self._held.add(mark)
        return True

    def forget(self, address: Address) -> None:
        """Want it no longer. It is removed with the next mark, or by the end of the session."""
        self.wanted.pop(mark_of(address), None)

    def heard(self, payload: str) -> None:
        """Wake those who wait for the record of this mark."""
        with suppress(ValueError):
            address = self.wanted.get(int(payload))
            if address is not None:
                waiters.wake(address)

    def lost(self) -> None:
        """Tell all who wait that nobody tells them any more."""
        wanted, self.wanted = self.wanted, {}
        for address in wanted.values():
            waiters.nobody_tells(address)


def tell_pooled(name: str) -> None:
    logging.getLogger("onefold").warning(POOLED, name)


def tell_failed(name: str, error: BaseException) -> None:
    logging.getLogger("onefold").debug("%s: nobody hears of the ends of records: %s", name, error)


def is_pooled(reported: Any, server: Any) -> bool:
    return bool(reported != server)
