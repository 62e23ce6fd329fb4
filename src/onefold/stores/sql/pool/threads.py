"""The pool for threads, and what it lends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from onefold.errors import StoreUnavailable
from onefold.stores.reserved import connecting
from onefold.stores.sql.connection import Connection
from onefold.stores.sql.pool.common import IDLE, PATIENCE, SIZE, all_in_use, inherited
from onefold.stores.sql.pool.slots import Slots, Waiter


class Pool:
    """A pool of connections for threads."""

    def __init__(self, connect: Callable[[], Connection], *, size: int = SIZE, patience: float = PATIENCE) -> None:
        self._connect = connect
        self._size = size
        self._patience = patience
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Connection] = []
        self._slots = Slots(self._size)
        self._pid = os.getpid()
        self._at_end = weakref.finalize(self, _close_all, self._idle, self._pid)

    def acquire(self) -> AbstractContextManager[Connection]:
        """Lend a connection outside any transaction. Keep it afterwards only if it is again outside one."""
        return Loan(self)

    def of_this_process(self) -> Slots:
        """Return the slots. A child must neither use nor close its parent's connections: it leaves them alone."""
        if self._pid != os.getpid():
            inherited.append(self._at_end.detach())
            self._reset()
        return self._slots

    def drop_idle(self) -> None:
        """Close the idle connections."""
        _close_all(self._idle, self._pid)

    def reserve(self) -> Reserve:
        """Return a pool of one extra connection, opened like these, that is lent to nobody else."""
        return Reserve(self._connect)

    def take(self, slots: Slots, waiter: Waiter) -> Connection:
        """Return a connection, once there is a slot for it."""
        if not slots.enter(waiter, self._patience):
            raise StoreUnavailable.unreached(all_in_use(self._size, self._patience))
        try:
            return self._idle.pop()
        except IndexError:
            with connecting():
                return self._connect()


class Loan:
    """A connection of a pool for as long as a `with` block lasts; every operation of a store takes one."""

    __slots__ = ("_conn", "_pid", "_pool", "_slots", "_waiter")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __enter__(self) -> Connection:
        pool, pid = self._pool, os.getpid()
        slots = pool._slots if pool._pid == pid else pool.of_this_process()
        waiter = Waiter()
        self._slots, self._waiter, self._pid = slots, waiter, pid
        try:
            self._conn = pool.take(slots, waiter)
        except BaseException:
            slots.leave(waiter)
            raise
        return self._conn

    def __exit__(self, *_: object) -> None:
        try:
            conn = self._conn
            if self._pid != os.getpid():
                # In a child that was forked meanwhile.
                inherited.append(conn)
            elif conn.transaction_status() is IDLE:
                self._pool._idle.append(conn)
            else:
                quietly(conn.close)
        finally:
            self._slots.leave(self._waiter)


class Reserve(Pool):
    """The one connection on which a store renews its claims. It is never lent to a handler."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        super().__init__(connect, size=1)
        self._opened_in = 0

    @property
    def is_held(self) -> bool:
        """Return whether it was opened in this process. If it was lost since, the next renewal opens another."""
        return self._opened_in == os.getpid()

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        with super().acquire() as conn:
            self._opened_in = os.getpid()
            yield conn

    def let_go(self) -> None:
        """Close it. The next claim opens another."""
        self._opened_in = 0
        self.drop_idle()


class OneOff:
    """Lends a connection that is opened on demand and closed afterwards."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        with connecting():
            conn = self._connect()
        try:
            yield conn
        finally:
            quietly(conn.close)

    def drop_idle(self) -> None:
        """Do nothing: no connection is kept."""


def _close_all(idle: list[Connection], pid: int) -> None:
    # A forked child leaves its parent's connections alone; and other threads pop from the list concurrently.
    with suppress(IndexError):
        while pid == os.getpid():
            quietly(idle.pop().close)


def quietly(close: Callable[[], None]) -> None:
    """Close something that may be broken, ignoring errors: they would help nobody."""
    with suppress(Exception):
        close()
