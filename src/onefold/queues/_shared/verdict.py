"""What becomes of a message: an outcome or an error says whether it is acknowledged, comes later, or never again. Pure.

The table is `onefold.errors.MEANINGS`; adapters only translate a verdict into their broker's own way.
"""

from __future__ import annotations

import traceback
from typing import Final, NamedTuple

from onefold import InProgress, OnefoldError, OnHold, RememberedFailure
from onefold.errors import MEANINGS, Meaning

# Where nothing says how long: a store may be back, and another worker done, in a moment.
SOON: Final = 1.0

# A person resolves what is on hold, and mends a worker; asking often does not help.
HELD_DELAY: Final = 60.0

# How often a message that is on hold comes again before it goes to the dead letters: a working day, and a night.
HELD_MAX: Final = 1_000


class Ack(NamedTuple):
    """It is done: acknowledge it."""

    def __bool__(self) -> bool:
        # A tuple without fields is false, and a verdict is not: `of_error(…) or …` must not pass over it.
        return True


class Later(NamedTuple):
    """Nothing ran, or not to its end elsewhere: give it back, after this many seconds. No failed attempt."""

    delay: float
    reason: str
    # Of these only so many are given back; then it is `Never`.
    limited: bool = False
    # What it waits for, for logs: the store's error, or that of a worker who cannot work.
    error: Exception | None = None


class Never(NamedTuple):
    """Coming again cannot help: to the dead letters, with this reason."""

    reason: str


class Failed(NamedTuple):
    """The handler raised: the broker's own rule for that applies."""

    error: Exception


Verdict = Ack | Later | Never | Failed

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
    """What this error means for the message of this operation and key. None: look at its record, and ask `of_state`.

    `final` are the errors that the policy remembers. `begun`: the handler was called, or the message itself was read;
    before that a `UsageError` is the worker's mistake, which would bury every message of the queue. `called`: the
    handler was called, so that whatever is done before is not this message.
    """
    meaning = meaning_of(error)
    if meaning is None:
        return Never(f"it failed for good with {named(error)}") if isinstance(error, final) else Failed(error)
    match meaning.queue:
        case "ack" if called or _is_of_another(error, own):
            # Of another guard, inside the handler: that is done, and this message is not.
            return Failed(error)
        case "ack":
            return ACK
        case "later" if isinstance(error, OnHold):
            if held_before >= HELD_MAX:
                return Never(reason_of(error))
            return Later(HELD_DELAY, reason_of(error), limited=True, error=error)
        case "later":
            wait = error.retry_after if isinstance(error, InProgress) else SOON
            return Later(max(wait, SOON), reason_of(error), error=error)
        case "later or never" if not begun:
            return Later(HELD_DELAY, reason_of(error), error=error)
        case "read once":
            return None
        case "never" | "later or never" | "by policy":
            return Never(reason_of(error))
        case "the broker's own rule":
            return Failed(error)


def _is_of_another(error: Exception, own: tuple[str, object]) -> bool:
    return isinstance(error, OnefoldError) and (error.operation, error.key) != (own[0], str(own[1]))


def of_state(state: str | None) -> Verdict:
    """After a claim was lost: another worker has it. What is done is acknowledged, and nothing else."""
    return ACK if state == "done" else Later(SOON, "another worker has taken it over")


def meaning_of(error: Exception) -> Meaning | None:
    """The row of the table. None: the handler's own error."""
    if not isinstance(error, OnefoldError):
        return None
    return next((MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS), None)


def reason_of(error: Exception) -> str:
    """For a dead letter, and for logs: our own messages hold digests, and no keys or payloads."""
    if isinstance(error, RememberedFailure):
        return f"it failed for good before, {f'with {error.type_name}' if error.type_name else 'resolved by hand'}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def named(error: Exception) -> str:
    """A handler's own error: what it is, and where it was raised. What it says may hold a payload."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
