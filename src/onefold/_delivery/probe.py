"""Ask a probe about a run whose outcome is unknown.

A probe that fails to answer says nothing about the delivery: it is asked again. So the claim under which it was asked
is not left until its lease ends, but ended at once; it stays the record of a run in doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from onefold._concurrency.generators import Flow
from onefold._concurrency.interrupts import is_answer
from onefold._concurrency.users_errors import repr_of
from onefold._delivery.steps import Ended, Extending, Running, Unwatching
from onefold._delivery.work import Delivery, refused
from onefold._model import Claim, Done, Entry, NotDone, ProbeAnswer, Unknown
from onefold.errors import ProbeFailed, UsageError
from onefold.events import Kind


def ask_probe(delivery: Delivery, entry: Entry, notes: bytes | None = None) -> Flow[ProbeAnswer | BaseException]:
    """Ask the probe; return its answer, or its error. `notes` are the steps of a run that has just ended."""
    ended: Ended = yield Running(cast("Callable[..., Any]", delivery.policy.after_crash), entry, probing=True)
    failure = ended.error
    if failure is None and not isinstance(ended.value, (Done, NotDone, Unknown)):
        failure = UsageError(
            f"{entry.address.operation} [key {entry.address.digest}]: a probe answers Done(value), NotDone() or "
            f"Unknown(), not {repr_of(ended.value)}"
        )
    if failure is None:
        delivery.tell(Kind.PROBED, entry.address, entry.attempt, type(ended.value).__name__)
        return cast("ProbeAnswer", ended.value)
    delivery.tell(Kind.PROBED, entry.address, entry.attempt, f"failed: {type(failure).__name__}")
    yield from _end_lease(delivery, entry, notes)
    return failure


def refusal(delivery: Delivery, entry: Entry, failure: BaseException) -> BaseException:
    """Return the error for a delivery whose probe failed. A wrong probe, and an interrupt, are raised unchanged."""
    if isinstance(failure, UsageError) or not isinstance(failure, Exception):
        return failure
    error = ProbeFailed.about(entry.address, problem=type(failure).__name__, attempt=entry.attempt)
    error.__cause__ = failure
    return refused(delivery, error)


def _end_lease(delivery: Delivery, entry: Entry, notes: bytes | None) -> Flow[None]:
    """Let the next delivery ask at once; or after a lease, if the store fails now or a renewal is in flight."""
    at_once = Claim(entry.address, entry.token, 0.0, entry.ttl)
    try:
        yield Extending(at_once, notes)
    except Exception as error:
        if not is_answer(error):
            raise
        # The probe's own error must surface, not this one.
        delivery.tell(Kind.STORE_FAILED, entry.address, entry.attempt, "extend")
    # In a batch the heartbeat would give it a new lease until the last message has run.
    yield Unwatching((at_once,))
