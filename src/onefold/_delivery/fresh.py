"""Find the new messages of a batch in the caller's transaction, and record them in one statement.

The rules are those of `joined`: each message has the flow of a joined claim, and their requests are sent together. An
error of the database is the caller's, because the transaction is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from onefold._concurrency.generators import Flow
from onefold._delivery import decide as _decide
from onefold._delivery.batch import BATCH_MAX
from onefold._delivery.joined import confirm_row, insert
from onefold._delivery.steps import Claiming, ClaimingAll, Ended, Spoiling
from onefold._delivery.work import Delivery, refused
from onefold._model import Address, Entry, Fresh
from onefold.errors import KeyReused, OnefoldError, ResultUnreadable, UsageError
from onefold.events import Kind

M = TypeVar("M")

# On Python 3.11 accessing an enum's members is slow.
_STARTED: Final = Kind.STARTED
_FINISHED: Final = Kind.FINISHED

# True: new. False: seen. An error: unsettled.
Verdict = bool | Exception


def sort_out_all(messages: Sequence[M], deliveries: Sequence[Delivery | Exception]) -> Flow[Fresh[M]]:
    """Sort out a batch of any size, in parts of at most BATCH_MAX messages."""
    verdicts: list[Verdict] = []
    for start in range(0, len(deliveries), BATCH_MAX):
        try:
            verdicts += yield from sort_out(deliveries[start : start + BATCH_MAX])
        except Exception:
            if verdicts:
                # Earlier parts are recorded as done, and nobody learns which: they must not be committed.
                yield Spoiling()
            raise
    return _by_verdict(messages, verdicts)


def sort_out_rows(
    messages: Sequence[M], deliveries: Sequence[Delivery | Exception], won: list[tuple[Delivery, Entry]]
) -> Flow[Fresh[M]]:
    """Sort out a batch whose records are rows that the caller writes. Those of `won` have to be proven by `prove_rows`.

    One after the other, because each takes a lock; in one order, so that two batches do not deadlock.
    """
    return _by_verdict(messages, (yield from sort_out(deliveries, won)))


def prove_rows(won: Sequence[tuple[Delivery, Entry]]) -> Flow[None]:
    """Prove that the caller has written the rows; the last claim first, as savepoints end."""
    for delivery, entry in reversed(won):
        yield from confirm_row(delivery, entry, Ended())
        delivery.tell(Kind.FINISHED, entry.address, entry.attempt)


def _by_verdict(messages: Sequence[M], verdicts: Sequence[Verdict]) -> Fresh[M]:
    pairs = list(zip(messages, verdicts, strict=True))
    return Fresh(
        new=[message for message, verdict in pairs if verdict is True],
        seen=[message for message, verdict in pairs if verdict is False],
        unsettled=[message for message, verdict in pairs if isinstance(verdict, Exception)],
        problems=[verdict for verdict in verdicts if isinstance(verdict, Exception)],
    )


def sort_out(
    deliveries: Sequence[Delivery | Exception], won: list[tuple[Delivery, Entry]] | None = None
) -> Flow[list[Verdict]]:
    """Return the verdict on each message, in order; an exception in place of a delivery stays there.

    `won` is as in `sort_out_rows`.
    """
    firsts: dict[Address, Delivery] = {}
    for delivery in deliveries:
        if isinstance(delivery, Delivery):
            firsts.setdefault(delivery.request.address, delivery)
    asked = list(firsts.values())
    verdicts = yield from _ask_together(asked) if won is None else _ask_each(asked, won)
    by_address = dict(zip(firsts, verdicts, strict=True))
    found: list[Verdict] = []
    for delivery in deliveries:
        if isinstance(delivery, Exception):
            found.append(delivery)
        elif delivery is firsts[delivery.request.address]:
            found.append(by_address[delivery.request.address])
        else:
            found.append(_repeated(delivery, firsts[delivery.request.address], by_address[delivery.request.address]))
    return found


def _ask_together(deliveries: Sequence[Delivery]) -> Flow[list[Verdict]]:
    if not deliveries:
        return []
    # The first request of `insert`, without starting a flow for each message: nearly all of them are new.
    entries = [
        _decide.done_at_once(delivery.request, delivery.policy, token)
        for delivery, token in zip(deliveries, _tokens(deliveries), strict=True)
    ]
    replies = yield ClaimingAll([Claiming(entry) for entry in entries])
    verdicts: list[Verdict] = []
    for delivery, entry, reply in zip(deliveries, entries, replies, strict=True):
        if reply is None:
            delivery.tell(_STARTED, entry.address, entry.attempt)
            delivery.tell(_FINISHED, entry.address, entry.attempt)
            verdicts.append(True)
        else:
            flow: Flow[Any] = insert(delivery, entry=entry)
            next(flow)
            verdicts.append((yield from _to_its_end(delivery, flow, reply)))
    return verdicts


def _tokens(deliveries: Sequence[Delivery]) -> list[bytes]:
    """Return a token for each, drawn at once if possible: the deliveries of a batch share their mint."""
    many = getattr(deliveries[0].mint, "many", None)
    return many(len(deliveries)) if many is not None else [delivery.mint() for delivery in deliveries]


def _ask_each(deliveries: Sequence[Delivery], won: list[tuple[Delivery, Entry]]) -> Flow[list[Verdict]]:
    verdicts: dict[Address, Verdict] = {}
    for delivery in sorted(deliveries, key=lambda delivery: delivery.request.address.parts):
        address = delivery.request.address
        try:
            entry = yield from insert(delivery)
        except UsageError:
            # Of the worker's: the table, its column, its scope.
            raise
        except OnefoldError as problem:
            verdicts[address] = problem
        else:
            verdicts[address] = isinstance(entry, Entry)
            if isinstance(entry, Entry):
                won.append((delivery, entry))
    return [verdicts[delivery.request.address] for delivery in deliveries]


def _to_its_end(delivery: Delivery, flow: Flow[Any], reply: Any) -> Flow[Verdict]:
    """Run the flow of one message to its end. A second request (for a record that is taken over) is rare."""
    while True:
        try:
            step = flow.send(reply)
        except StopIteration as end:
            if isinstance(end.value, Entry):
                delivery.tell(Kind.FINISHED, end.value.address, end.value.attempt)
                return True
            return False
        except ResultUnreadable:
            # Nobody needs the result here, and it is done.
            return False
        except OnefoldError as problem:
            return problem
        assert isinstance(step, Claiming)
        reply = yield step


def _repeated(delivery: Delivery, first: Delivery, verdict: Verdict) -> Verdict:
    """Return the verdict on a further message of a key in this batch."""
    if _decide.reused(first.request.fingerprint, delivery.request.fingerprint):
        return refused(delivery, KeyReused.about(delivery.request.address))
    if isinstance(verdict, Exception):
        return verdict
    delivery.tell(Kind.REPLAYED, delivery.request.address, 1)
    return False
