"""Deliver whole batches in one transaction of the caller's: their new messages are processed and recorded in it.

If it fails, each message gets its own transaction, so that one poison message fails alone. Before a message counts as
finished, the commit is verified: a transaction that nobody commits would lose them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from onefold import (
    AsyncGuard,
    Guard,
    NotInTransaction,
    OnefoldError,
    Policy,
    RecordColumn,
    StoreUnavailable,
    UsageError,
)
from onefold._concurrency.generators import Flow, run, run_async
from onefold.current import NotOneDelivery, in_batch
from onefold.queues._shared.batches import Numbers, OnItsWay, Sorted, verdict_of
from onefold.queues._shared.consumer import MissingKeyRule, finished, nothing
from onefold.queues._shared.logs import address_of
from onefold.queues._shared.options import takes_tx
from onefold.queues._shared.verdict import ACK, HandlerRaised, Verdict, is_about_a_message
from onefold.queues.keys import KeyOf, PayloadOf
from onefold.stores.base import Address, Joinable
from onefold.transactions import join

# Called with the finished messages of a poll, for an offset that is kept with the work.
Finished = Callable[[Any, Numbers], Any]

# A record that was just committed is visible at once; between the nodes of a cluster it may take a moment.
PAUSES: Final = (0.0, 0.1, 0.4, 1.0)

NOT_COMMITTED: Final = (
    "the transaction has ended, but its records are not there: neither they nor the work were committed. No offset "
    "was moved. transaction= has to open a transaction that commits at its end (engine.begin, not engine.connect), "
    "in the guard's database; the handler must neither roll it back nor continue after a statement has failed"
)


class Misused(UsageError):
    """A mistake of the worker, not of a message: raised to the caller, and the poll comes again."""


class Ways(NamedTuple):
    """The sync or async operations: deliver a poll in one transaction, look for a record, and sleep."""

    together: Callable[..., Any]
    is_there: Callable[[str], Any]
    sleep: Callable[[float], Any]


class TransactionalBatches:
    """A handler for the new messages of a poll, which works in the transaction in which they are recorded."""

    def __init__(
        self,
        guard: Guard | AsyncGuard,
        operation: str,
        handler: Callable[..., Any],
        transaction: Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]],
        *,
        key: KeyOf,
        missing_key: MissingKeyRule,
        policy: Policy | None,
        payload: PayloadOf | None = None,
        record: RecordColumn | None = None,
    ) -> None:
        _check_transaction(transaction)
        if not takes_tx(handler):
            raise UsageError("guarded_batches() works in a transaction: the handler has to take tx")
        if (policy or guard.policy).final_errors:
            raise UsageError(
                "guarded_batches() cannot remember a failure: the rollback removes it. Pass final_errors=()"
            )
        self._guard: Any = guard
        self._operation = operation
        self._handler = handler
        self._transaction: Any = transaction
        self._key = key
        self._missing_key = missing_key
        self._payload = payload
        self._policy = policy
        self._record = record
        # Whether a transaction was seen to commit.
        self._commits = False

    def deliver(self, deliveries: Sequence[OnItsWay], then: Finished | None = None) -> list[Verdict]:
        return run(self._deliver(deliveries, then, Ways(self._together, self._is_there, time.sleep)))

    async def deliver_async(self, deliveries: Sequence[OnItsWay], then: Finished | None = None) -> list[Verdict]:
        ways = Ways(self._together_async, self._is_there_async, asyncio.sleep)
        return await run_async(self._deliver(deliveries, then, ways))

    def _deliver(self, deliveries: Sequence[OnItsWay], then: Finished | None, ways: Ways) -> Flow[list[Verdict]]:
        try:
            sort: Sorted = yield partial(ways.together, deliveries, then)
            if sort.recorded:
                yield from self._check_committed(sort.recorded[0], ways)
            return sort.verdicts
        except Exception as error:  # noqa: BLE001 - the handler's, or the database's
            settled = _settled(error, len(deliveries))
        if settled is not None:
            return settled
        verdicts: list[Verdict] = []
        for number, delivery in enumerate(deliveries):
            verdicts += yield from self._deliver([delivery], _after(then, number, verdicts), ways)
        return verdicts

    def _check_committed(self, key: str, ways: Ways) -> Flow[None]:
        """Raise unless the record is found where later deliveries look for it."""
        with _asking():
            for pause in PAUSES:
                yield partial(ways.sleep, pause)
                if (yield partial(ways.is_there, key)):
                    self._commits = True
                    return
        raise self._not_committed()

    def _together(self, deliveries: Sequence[OnItsWay], then: Finished | None) -> Sorted:
        with ExitStack() as stack:

            def begin() -> Any:
                return stack.enter_context(_opened_by(self._transaction(), "__enter__"))

            return run(self._in_one(deliveries, then, begin, nothing))

    async def _together_async(self, deliveries: Sequence[OnItsWay], then: Finished | None) -> Sorted:
        async with AsyncExitStack() as stack:

            def begin() -> Any:
                return stack.enter_async_context(_opened_by(self._transaction(), "__aenter__"))

            return await run_async(self._in_one(deliveries, then, begin, finished))

    def _in_one(
        self,
        deliveries: Sequence[OnItsWay],
        then: Finished | None,
        begin: Callable[[], Any],
        end: Callable[[Any], Any],
    ) -> Flow[Sorted]:
        """Begin a transaction, and record the poll in it; `end` takes what the handler returns. The caller commits."""
        sort = Sorted(deliveries, self._key, self._missing_key, self._payload)
        with _opening():
            tx = yield begin
        rows = None if self._record is None else self._rows(tx, sort)
        with _asking():
            new = sort.take_fresh((yield partial(self._fresh, tx, sort) if rows is None else rows.fresh))
        if new:
            messages = [deliveries[number].native for number in new]
            with in_batch():
                yield lambda: end(self._handler(messages, tx=tx))
        if rows is not None:
            yield rows.prove
        if then is not None:
            yield partial(then, tx, sort.finished)
        return sort

    def _is_there(self, key: str) -> bool:
        if self._record is None and isinstance(self._guard.store, Joinable):
            return self._guard.read(self._operation, key) is not None
        with _opening(), self._transaction() as tx:
            return join(tx, self._record, is_async=False).read(self._address(key)) is not None

    async def _is_there_async(self, key: str) -> bool:
        if self._record is None and isinstance(self._guard.store, Joinable):
            return await self._guard.read(self._operation, key) is not None
        with _opening():
            async with self._transaction() as tx:
                return await join(tx, self._record, is_async=True).read(self._address(key)) is not None

    def _not_committed(self) -> UsageError:
        """Return the error of a missing commit.

        If one has committed before, the handler is at fault: go message by message.
        """
        return UsageError(NOT_COMMITTED) if self._commits else Misused(NOT_COMMITTED)

    def _fresh(self, tx: Any, sort: Sorted) -> Any:
        keys = sort.keys
        joined = self._guard.within(tx)
        return joined.fresh(
            self._operation,
            list(keys),
            key=keys.__getitem__,
            payload=sort.payload,
            policy=self._policy,
        )

    def _rows(self, tx: Any, sort: Sorted) -> Any:
        """Return the batch whose records are rows that the handler writes."""
        keys = sort.keys
        joined = self._guard.within(tx, record=self._record)
        return joined._sort_out_rows(self._operation, list(keys), keys.__getitem__, sort.payload, self._policy)

    def _address(self, key: str) -> Address:
        return address_of(self._guard, self._operation, key)


class StoreAway(Exception):
    """No transaction could be opened, or no record written: the database is down, and no message has failed."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


def _check_transaction(transaction: Any) -> None:
    if not callable(transaction):
        raise UsageError("transaction= is a function that opens one: engine.begin, pool.connection, ...")
    owner = getattr(transaction, "__self__", transaction)
    if type(owner).__module__.partition(".")[0] != "sqlalchemy":
        return
    # SQLAlchemy silently rolls back a connection or session that is closed.
    if owner is transaction or transaction.__name__ in ("connect", "raw_connection"):
        name = type(owner).__name__ if owner is transaction else f"{type(owner).__name__}.{transaction.__name__}"
        raise UsageError(
            f"transaction={name} does not commit at its end: use engine.begin, or sessionmaker(engine).begin"
        )


def _opened_by(transaction: Any, way_in: str) -> Any:
    if not hasattr(transaction, way_in):
        kind, text = type(transaction).__name__, "async with" if way_in == "__aenter__" else "with"
        raise Misused(f"transaction= returns {kind}, but this client opens it with `{text}`")
    return transaction


@contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except Misused:
        raise
    except Exception as error:
        # A driver's message about a login may contain one.
        raise StoreAway(_away(StoreUnavailable(f"no transaction could be opened: {type(error).__name__}"))) from error


@contextmanager
def _asking() -> Iterator[None]:
    """Mark errors before the handler is called: they are the transaction's or the guard's, not a message's."""
    try:
        yield
    except StoreUnavailable as error:
        raise StoreAway(_away(error)) from error
    except (UsageError, NotInTransaction) as error:
        if is_about_a_message(error):
            raise
        raise Misused(str(error)) from error


def _away(error: Exception) -> Verdict:
    return verdict_of(error, begun=False)


def _settled(error: Exception, count: int) -> list[Verdict] | None:
    """Return the verdicts on this many messages after an error; None if each gets its own transaction."""
    if isinstance(error, (Misused, NotOneDelivery)):
        raise error
    if isinstance(error, StoreAway):
        return [error.verdict] * count
    if count > 1:
        return None
    return [verdict_of(error) if isinstance(error, OnefoldError) else HandlerRaised(error)]


def _after(then: Finished | None, number: int, before: list[Verdict]) -> Finished | None:
    """Narrow it to one message: those finished before it count as finished, too."""
    if then is None:
        return None
    done = [at for at, verdict in enumerate(before) if verdict == ACK]
    return lambda tx, numbers: then(tx, [*done, *([number] if numbers else [])])
