"""Joined mode: the record is written in the same transaction as the work, and commits with it or not at all.

`join` runs inside a transaction that the caller owns; `transact` opens one, and retries in a new one if the database
asks for it. No outcome is ever unknown here, so `wait`, `after_crash` and `store_down` have no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from onefold._concurrency.generators import Flow
from onefold._delivery import decide as _decide
from onefold._delivery.claim import RETRY_AFTER, ROUNDS_MAX, answer
from onefold._delivery.decide import Then
from onefold._delivery.steps import (
    Beginning,
    Claiming,
    Committing,
    Ended,
    Finishing,
    Judging,
    Pausing,
    Reading,
    Releasing,
    RollingBack,
    Running,
    Saving,
    StillOpen,
)
from onefold._delivery.work import Delivery, done_ending, failed_ending, refused, with_history
from onefold._model import Address, Commit, Ending, Entry, Gone, Outcome, Record, State
from onefold._model.remarks import without_error_text
from onefold.errors import Held, InProgress, OnefoldError, StoreUnavailable, UsageError
from onefold.events import Kind

# Serialization failures, deadlocks, lost connections: each is a transaction that left nothing behind, or all of it.
TRANSACTIONS_MAX: Final = 30

# Transactions that collided once would collide again if they were retried together. All pauses of a delivery end within
# 13 s.
RETRY_PAUSE_FIRST: Final = 0.005
RETRY_PAUSE_MAX: Final = 0.5

NO_ROOM: Final = (
    "what current().note() was given is not kept: the record is the handler's own row. Write it into that row"
)

# Rows of strangers that come between several times are rare; a handler that writes its row twice does so each time.
BLAMED_MAX: Final = 2


def join(delivery: Delivery, *, confirm: bool = False) -> Flow[Outcome[Any]]:
    """Run one delivery in the caller's transaction: one statement before the handler, one after it for a result.

    `confirm` always sends the second one: for a record that is the handler's own row.
    """
    replaced: list[Record] = []
    won = yield from insert(delivery, replaced=replaced)
    if isinstance(won, Outcome):
        return won
    ended: Ended = yield Running(delivery.call, won)
    if ended.error is not None:
        yield from _take_back(delivery, won, replaced)
        if confirm:
            yield from _judge(won, ended.error)
        raise ended.error
    outcome = yield from confirm_row(delivery, won, ended) if confirm else _keep(delivery, won, ended)
    # The caller commits: we do not see it.
    delivery.tell(Kind.FINISHED, won.address, won.attempt)
    return outcome


class Overtaken(Exception):
    """Another delivery's row is in the way, perhaps not visible yet: a new transaction finds it."""

    def __init__(self, error: InProgress) -> None:
        super().__init__()
        self.error = error


@contextmanager
def _overtaken() -> Iterator[None]:
    """Tell the store's `InProgress` from one that a handler raises itself."""
    try:
        yield
    except InProgress as error:
        raise Overtaken(error) from error


def transact(delivery: Delivery, *, confirm: bool = False) -> Flow[Outcome[Any]]:
    """Run one delivery in a transaction of our own.

    A COMMIT whose reply was lost is resolved by delivering again: the claim waits for the old transaction, however it
    ends. Each transaction has its own token, so that its record is never taken for a claim to run. `confirm` is as in
    `join`: who meets the row of another delivery tries again in a new transaction, and is answered from it.
    """
    ours: dict[bytes, Outcome[Any]] = {}
    blamed: list[BaseException] = []
    committed = Commit.CONFLICT
    last: BaseException | None = None
    for before in range(TRANSACTIONS_MAX):
        if before:
            yield pause_after(before, delivery.mint())
        try:
            yield Beginning()
        except StoreUnavailable as problem:
            if committed is Commit.UNKNOWN:
                raise _in_doubt(delivery) from problem
            raise
        try:
            result = yield from _attempt_by_row(delivery, blamed) if confirm else _attempt(delivery, ours)
        except GeneratorExit:
            raise
        except BaseException as problem:
            if (yield RollingBack(problem)) or isinstance(problem, Overtaken):
                last = problem
                continue
            if committed is Commit.UNKNOWN and isinstance(problem, StoreUnavailable):
                raise _in_doubt(delivery) from problem
            raise
        committed = yield from _named(Committing(), delivery.request.address)
        if committed is Commit.DONE or (committed is Commit.UNKNOWN and _is_known(result)):
            _tell_committed(delivery, result)
            if isinstance(result, Exception):
                raise result
            return result
    if isinstance(last, Overtaken):
        raise refused(delivery, last.error)
    address = delivery.request.address
    raise StoreUnavailable(
        f"{address.operation} [key {address.digest}]: not committed after {TRANSACTIONS_MAX} transactions. "
        "Deliver it again: if one of them was committed after all, it is replayed"
    )


def _in_doubt(delivery: Delivery) -> StoreUnavailable:
    """Create the error for a run in doubt: it ran, and any later error of the store concerns its outcome."""
    address = delivery.request.address
    return StoreUnavailable(
        f"{address.operation} [key {address.digest}]: it ran, the answer to its COMMIT was lost, and now the store "
        "cannot be asked whether it was committed. Deliver it again: if it was, it is replayed"
    )


def pause_after(transactions: int, token: bytes) -> Pausing:
    """Return the pause before one more transaction: longer each time, with jitter."""
    longest = min(RETRY_PAUSE_FIRST * 2 ** (transactions - 1), RETRY_PAUSE_MAX)
    # A flow has no random numbers; a unique token serves as well.
    return Pausing(longest * int.from_bytes(token[:4], "big") / 2**32)


def _attempt(delivery: Delivery, ours: dict[bytes, Outcome[Any]]) -> Flow[Outcome[Any] | Exception]:
    """Run the inside of one transaction. A returned exception has to be committed as a remembered failure."""
    won = yield from insert(delivery, ours)
    if isinstance(won, Outcome):
        return won
    if delivery.policy.final_errors:
        yield Saving()
    ended: Ended = yield Running(delivery.call, won)
    error = ended.error
    if isinstance(error, Exception) and _decide.is_final(error, delivery.policy):
        try:
            yield from _named(RollingBack(error, to_savepoint=True), won.address)
            yield from _finish(won, failed_ending(delivery, error, ended.noted))
        except UsageError as mistake:
            # The handler has also ended the transaction. Its own error is shown with it.
            raise mistake from error
        return error
    if error is not None:
        delivery.tell(Kind.RELEASED, won.address, won.attempt, type(error).__name__)
        raise error
    outcome = yield from _keep(delivery, won, ended)
    ours[won.token] = outcome
    return outcome


def _attempt_by_row(delivery: Delivery, blamed: list[BaseException]) -> Flow[Outcome[Any]]:
    """Run the inside of one transaction whose record is the handler's own row.

    Raise `Overtaken` if another delivery has written it, or is about to; `blamed` are errors of earlier transactions.
    """
    with _overtaken():
        won = yield from insert(delivery)
    if isinstance(won, Outcome):
        return won
    ended: Ended = yield Running(delivery.call, won)
    with _overtaken():
        if ended.error is None:
            return (yield from confirm_row(delivery, won, ended, blamed))
        yield from _judge(won, ended.error, blamed)
    delivery.tell(Kind.RELEASED, won.address, won.attempt, type(ended.error).__name__)
    raise ended.error


def insert(
    delivery: Delivery,
    ours: dict[bytes, Outcome[Any]] | None = None,
    replaced: list[Record] | None = None,
    entry: Entry | None = None,
) -> Flow[Entry | Outcome[Any]]:
    """Write the record as done at once, or answer from the existing one; `ours` are those of earlier transactions.

    The record that it replaced is appended to `replaced`. `entry` is the record to write, if it was made already.
    """
    request, policy = delivery.request, delivery.policy
    replacing: Record | None = None
    if entry is None:
        entry = _decide.done_at_once(request, policy, delivery.mint())
    token = entry.token
    for _ in range(ROUNDS_MAX):
        found: Record | Gone | None = yield Claiming(entry, replacing)
        if found is None:
            if replaced is not None and replacing is not None:
                replaced.append(replacing)
            delivery.tell(Kind.STARTED, request.address, entry.attempt)
            return entry
        if not isinstance(found, Record):
            replacing = None
            continue
        if ours and found.token in ours:
            return ours[found.token]
        then = _decide.decide(found, request, policy)
        settled = answer(delivery, found, then)
        if settled is not None:
            return settled
        if then not in (Then.RUN, Then.RUN_AGAIN, Then.TAKE_OVER):
            remark = without_error_text(_decide.why_held(found, policy))
            raise refused(delivery, Held.about(request.address, remark=remark))
        entry, replacing = _done_at_once(_decide.entry(then, found, request, policy, token), delivery), found
    raise refused(delivery, InProgress.about(request.address, retry_after=RETRY_AFTER))


def _keep(delivery: Delivery, entry: Entry, ended: Ended, *, confirm: bool = False) -> Flow[Outcome[Any]]:
    """Send the second statement, if there is a result or a note."""
    ending = done_ending(delivery, ended.value, entry.attempt, noted=ended.noted)
    if confirm and ended.noted:
        delivery.tell.warn(entry.address, NO_ROOM, about="note")
    if ending.result is not None or ending.omitted or ending.notes is not None or confirm:
        yield from _finish(entry, ending)
    else:
        yield from _named(StillOpen(entry.as_claim()), entry.address)
    return Outcome(kept=ended.value, attempt=entry.attempt)


def confirm_row(
    delivery: Delivery, entry: Entry, ended: Ended, blamed: list[BaseException] | None = None
) -> Flow[Outcome[Any]]:
    """Keep the result of a handler whose own row is the record. What the handler left pending may fail only now."""
    try:
        return (yield from _keep(delivery, entry, ended, confirm=True))
    except OnefoldError:
        raise
    except Exception as error:
        yield from _judge(entry, error, blamed)
        raise


def _judge(entry: Entry, error: BaseException, blamed: list[BaseException] | None = None) -> Flow[None]:
    """Raise `InProgress` if the error comes from a row that another delivery has written.

    With `blamed`, a new transaction follows, which finds that row: so it is raised as well if nobody can tell. An error
    that comes again and again although no row was found is the handler's own.
    """
    overtaken: InProgress | None = None
    try:
        yield Judging(entry.as_claim(), error)
    except InProgress as found:
        overtaken = found
    except Exception:  # noqa: BLE001 - the handler's own error is the one to show
        if blamed is not None:
            overtaken = InProgress.about(entry.address, retry_after=RETRY_AFTER)
    if overtaken is None or (blamed is not None and len(blamed) >= BLAMED_MAX):
        return
    if blamed is not None:
        blamed.append(error)
    raise overtaken from error


def _finish(entry: Entry, ending: Ending) -> Flow[None]:
    """End our record, which has to be there still."""
    finished: bool = yield from _named(Finishing(entry.as_claim(), with_history(ending, entry)), entry.address)
    if not finished:
        raise UsageError(
            f"{entry.address.operation} [key {entry.address.digest}]: its record is gone, so the work would be "
            "committed without it. The handler has rolled back, or deleted it. Roll back, and deliver it again"
        )


def _named(step: object, address: Address) -> Flow[Any]:
    """Perform a step after the handler. If the store says what the handler did wrong, name the delivery."""
    try:
        return (yield step)
    except UsageError as error:
        if not error.operation:
            error.args = (f"{address.operation} [key {address.digest}]: {error}",)
            error.operation, error.key, error.scope = address.operation, address.key, address.scope
        raise


def _take_back(delivery: Delivery, entry: Entry, replaced: list[Record]) -> Flow[None]:
    """Delete our record, so that a caller who catches the error and commits does not lose the delivery.

    A bypass restores the record that it replaced: a finished delivery stays finished.
    """
    try:
        if replaced and delivery.request.bypass:
            ours: Record | None = yield Reading(entry.address)
            yield Claiming(replaced[0].as_entry(entry.token), ours)
        else:
            yield Releasing(entry.as_claim())
    except Exception:  # noqa: BLE001 - an aborted transaction takes the record back by itself
        delivery.tell(Kind.STORE_FAILED, entry.address, entry.attempt, "release")
        return
    delivery.tell(Kind.RELEASED, entry.address, entry.attempt)


def _tell_committed(delivery: Delivery, result: Outcome[Any] | Exception) -> None:
    """Emit events only after the commit."""
    if isinstance(result, Exception):
        delivery.tell(Kind.FAILED, delivery.request.address, detail=type(result).__name__)
    elif not result.replayed:
        delivery.tell(Kind.FINISHED, delivery.request.address, result.attempt)


def _is_known(result: Outcome[Any] | Exception) -> bool:
    """Return whether the outcome is certain: a replay wrote nothing, so its transaction cannot change it."""
    return isinstance(result, Outcome) and result.replayed


def _done_at_once(entry: Entry, delivery: Delivery) -> Entry:
    return _decide.change(entry, state=State.DONE, lease=0.0, ttl=delivery.policy.keep, notes=None, result=None)
