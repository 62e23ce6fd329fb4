"""Do something after the commit of a session, once its connection is back in the pool: the background purge.

Of the two events of a session that tell of a commit, the first comes while its connection is still in use, and also for
a savepoint; the second comes after it, and also for a rollback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

# Does it so many times.
Work = Callable[[int], None]


class Waiting:
    """What a session has to do after its next commit."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.times = 0
        self.is_committed = False

    def take(self) -> tuple[Work | None, int]:
        """Return it, once, if the session was committed."""
        found = (self.work, self.times) if self.is_committed else (None, 0)
        self.work, self.times, self.is_committed = None, 0, False
        return found


_waiting: WeakKeyDictionary[Session, Waiting] = WeakKeyDictionary()


def after_commit(session: Session, work: Work, times: int) -> None:
    """Do `work` after the commit of the session's transaction, and not after a rollback."""
    waiting = _waiting.get(session)
    if waiting is None:
        waiting = _waiting[session] = Waiting()
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_transaction_end", _ended)
    waiting.work, waiting.times = work, waiting.times + times


def _committed(session: Session) -> None:
    if not session.in_nested_transaction():
        _waiting[session].is_committed = True


def _ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is not None:
        return
    work, times = _waiting[session].take()
    if work is not None and not _is_inside(session.bind):
        work(times)


def _is_inside(bind: Any) -> bool:
    """Return whether the session was only a part of a transaction of the connection that it was bound to."""
    return isinstance(bind, Connection) and not bind.closed and bind.in_transaction()
