"""Decide from an outcome or an error whether a message is acknowledged, comes later, or never again. Pure.

The table is `onefold.errors.MEANINGS`; adapters only translate a verdict for their broker.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from onefold import Held, InProgress, OnefoldError, RememberedFailure
from onefold.errors import MEANINGS, Meaning
from onefold.queues._shared.own_frame import location

# The default: a store may be back, and another worker done, in a moment.
SOON: Final = 1.0

# A person resolves a held message, and fixes a worker; asking often does not help.
HELD_DELAY: Final = 60.0

# How often a held message comes again before it goes to the dead letters: a working day, and a night.
HELD_MAX: Final = 1_000


class Ack(NamedTuple):
    """It is done: acknowledge it."""

    def __bool__(self) -> bool:
        # A tuple without fields is falsy, but a verdict is not: `of_error(…) or …` must not skip it.
        return True


class Later(NamedTuple):
    """Nothing ran, or it is still running elsewhere: give it back after this many seconds. Not a failed attempt."""

    delay: float
    reason: str
    # Given back only a limited number of times; then it is `Never`.
    limited: bool = False
    # The reason for the wait, for logs: the store's error, or that of a worker that cannot work.
    error: Exception | None = None


class Never(NamedTuple):
    """Delivering it again cannot help: to the dead letters, with this reason."""

    reason: str


class HandlerRaised(NamedTuple):
    """The handler raised: the broker's own rule for that applies."""

    error: Exception


Verdict = Ack | Later | Never | HandlerRaised

ACK: Final = Ack()


def of_error(
    error: Exception,
    *,
    own: tuple[str, object] = ("", ""),
    final: tuple[type[Exception], ...] = (),
    held_before: int = 0,
    begun: bool = True,
    called: bool = False,
) -> Verdict | None:
    """Return the verdict on the message of this operation and key; None: read its record, and ask `of_state`.

    `final` are the errors that the policy remembers. `begun`: the handler was called, or the message itself was read;
    before that a `UsageError` that names no key is the worker's mistake, which would bury every message of the queue.
    `called`: the handler was called, so anything done before is not this message.
    """
    meaning = meaning_of(error)
    if meaning is None:
        return Never(f"it failed for good with {named(error)}") if isinstance(error, final) else HandlerRaised(error)
    match meaning.queue:
        case "ack" if called or _is_of_another(error, own):
            # From another guard, inside the handler: that delivery is done, and this message is not.
            return HandlerRaised(error)
        case "ack":
            return ACK
        case "later" if isinstance(error, Held):
            if held_before >= HELD_MAX:
                return Never(reason_of(error))
            return Later(HELD_DELAY, reason_of(error), limited=True, error=error)
        case "later":
            wait = error.retry_after if isinstance(error, InProgress) else SOON
            return Later(max(wait, SOON), reason_of(error), error=error)
        case "later or never" if not begun and not is_about_a_message(error):
            return Later(HELD_DELAY, reason_of(error), error=error)
        case "read once":
            return None
        case "by policy" if called:
            # This message has a key; what the handler sent, or ran, had none.
            return HandlerRaised(error)
        case "never" | "later or never" | "by policy":
            return Never(reason_of(error))
        case "the broker's own rule":
            return HandlerRaised(error)


def of_interrupt(error: BaseException) -> Later:
    """Return the verdict on a message whose handler raised what is no `Exception`: nobody knows its outcome."""
    return Later(SOON, f"the handler raised {type(error).__name__}")


def is_about_a_message(error: Exception) -> bool:
    """Return whether an error names one delivery: its key does not fit a column. The worker can do the others."""
    return isinstance(error, OnefoldError) and bool(error.key)


def _is_of_another(error: Exception, own: tuple[str, object]) -> bool:
    return isinstance(error, OnefoldError) and (error.operation, error.key) != (own[0], str(own[1]))


def of_state(state: str | None) -> Verdict:
    """Return the verdict after a claim was lost: if another worker has finished it, acknowledge; otherwise do not."""
    return ACK if state == "done" else Later(SOON, "another worker has taken it over")


def meaning_of(error: Exception) -> Meaning | None:
    """Return the row of the table; None if it is the handler's own error."""
    if not isinstance(error, OnefoldError):
        return None
    return next((MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS), None)


def reason_of(error: Exception) -> str:
    """Return the reason for a dead letter, and for logs: our own messages contain digests, not keys or payloads."""
    if isinstance(error, RememberedFailure):
        return f"it failed for good before, {f'with {error.type_name}' if error.type_name else 'resolved by hand'}"
    told = " ".join(str(error).split())
    if isinstance(error, InProgress):
        # The advice is for those who deliver it themselves. Here the adapter does, and the log says when.
        told = told.partition(". Deliver it again in ")[0]
    return f"{type(error).__name__}: {told}"


def named(error: BaseException) -> str:
    """Describe a handler's own error by its type and its place in the user's code. Its text may contain a payload."""
    where = location(error)
    return f"{type(error).__name__} at {where}" if where else type(error).__name__
