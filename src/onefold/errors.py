"""Errors, and what each means to a web framework or a queue. This file imports nothing from the package.

    OnefoldError
    ├── UsageError           the calling code is wrong: a name, a type, a duration, sync for async
    ├── MissingKey           there is no usable key, but one is required
    ├── KeyReused            this key was used with another payload
    ├── InProgress           another delivery runs it now
    ├── Held                 its outcome is unknown: a person or a probe must resolve it
    ├── InsideItself         the handler delivered its own key again
    ├── ClaimLost            it ran, but another delivery had taken over its claim
    ├── ResultNotKept        it is done, but there is no stored result to replay
    │   └── ResultUnreadable there is one, but today's code cannot read it
    ├── RememberedFailure    it failed for good, and its own exception cannot be rebuilt
    ├── StoreUnavailable     the store did not answer
    │   └── ProbeFailed      the probe raised, so an earlier outcome is still unknown: ask it again
    ├── NotInTransaction     `within` was called where no transaction is open
    └── OutcomeUnknown       raised by handlers: "nobody knows whether it happened"

A message names the operation and the digest of the key, as logs do; the key itself is in the attributes.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

_NOTHING_RAN: Final = re.compile(r"(^|\s)Nothing ran\.|(^|\.\s)Nothing ran$")


class Named(Protocol):
    """The part of an address that an error needs."""

    @property
    def scope(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def digest(self) -> str: ...


class OnefoldError(Exception):
    """The root of every error that Onefold itself raises."""

    says = "something went wrong"

    operation: str = ""
    key: str = ""
    scope: str = ""

    @classmethod
    def about(cls, address: Named, **facts: Any) -> Self:
        """Create the error for one address, its message built from `says`; the facts become attributes."""
        error = cls(f"{address.operation} [key {address.digest}]: {cls.says.format(**facts)}")
        error.operation, error.key, error.scope = address.operation, address.key, address.scope
        for name, fact in facts.items():
            setattr(error, name, fact)
        return error


class UsageError(OnefoldError, ValueError):
    """The code that calls Onefold is wrong. Nothing has run, unless the message says so."""


class MissingKey(OnefoldError, ValueError):
    """There is no usable key: none was given, or it is empty, too long or of the wrong type."""


class KeyReused(OnefoldError):
    """The key was used before with a different payload: a bug in the sender. The record was not touched."""

    says = (
        "this key was used before with another payload, or a release has changed the shape of its payload. "
        "Nothing ran, and the record was not touched. "
        "Mint a new key for a new operation, or send the payload of the first one"
    )


class InProgress(OnefoldError):
    """Another delivery is running it now. Do not acknowledge: its owner may still die."""

    says = "another delivery is running it. Deliver it again in {retry_after:.2g} s; do not acknowledge it"

    retry_after: float = 0.0


class Held(OnefoldError):
    """The outcome of an earlier run is unknown, and a person or a probe has to resolve it."""

    says = (
        "held: {remark}. Find out whether the effect happened, then add --done, --failed or --rerun, and --reason, to "
        "`{command}`, or call guard.resolve(operation, key, Done(value) | Failed(error) | Rerun(), by=..., reason=...)"
    )

    remark: str = ""
    # The shell command that resolves it, but for what happened and why.
    command: str = ""

    @classmethod
    def about(cls, address: Named, **facts: Any) -> Self:
        """Create the error with the command that resolves this record. The digest stands for the key."""
        words = ["onefold", "resolve", "--digest", address.digest]
        if address.operation.isprintable():
            words += ["--operation", address.operation]
        return super().about(address, command=shlex.join(words), **facts)


class InsideItself(OnefoldError):
    """The handler delivered its own key to its own operation again: it would wait for itself."""

    says = "called from inside its own handler. Give the inner call an operation or a key of its own"


class ClaimLost(OnefoldError):
    """The handler ran, but its lease had ended and its claim was taken over. `value` is what it returned."""

    says = (
        "the handler ran, but its lease had already ended, and the claim is no longer its own. "
        "Its return value is in error.value; the record belongs to the new owner"
    )

    value: Any = None


class ResultNotKept(OnefoldError):
    """It is done, and will not run again; but no result was stored, so there is none to replay."""

    says = (
        "done before, but its result was not kept ({remark}). It did not run again: treat it as done. `.outcome()` has "
        "`omitted`, which says so without an error. If the function returns nothing, annotate it with `-> None`"
    )

    remark: str = ""


class ResultUnreadable(ResultNotKept):
    """It is done, but the stored result does not fit the type that today's code expects."""

    says = (
        "done before, but its stored result does not fit {expected}: {problem}. It did not run again. "
        "Keep the type able to read what it wrote, or pass returns= with the type that wrote it"
    )

    expected: str = ""
    problem: str = ""


class RememberedFailure(OnefoldError):
    """It failed with an exception that the policy remembers as final, but that cannot be rebuilt here."""

    says = "failed for good before: {cause}"

    # Empty if a person resolved it: `Failed("declined")`, or `onefold resolve --failed`.
    type_name: str = ""
    message: str = ""

    @classmethod
    def about(cls, address: Named, *, type_name: str = "", message: str = "", **facts: Any) -> Self:
        cause = f"{type_name}: {message}" if type_name else message
        return super().about(address, cause=cause, type_name=type_name, message=message, **facts)


class StoreUnavailable(OnefoldError):
    """The store did not answer, or refused. Before a handler this means that nothing ran."""

    # False: no connection could be opened, or the file was busy. There is nothing to undo, and no way to undo it now.
    reached: bool = True

    @classmethod
    def unreached(cls, message: str) -> Self:
        """Create the error of an operation that did not reach the store."""
        error = cls(message)
        error.reached = False
        return error


def although_it_ran(text: str) -> str:
    """Return what an error of a store says without the sentence "Nothing ran".

    Stores word their errors for a claim that is refused. They fail to renew a claim and to record its end, too, while
    the handler is running or has run.
    """
    return _NOTHING_RAN.sub("", text).lstrip()


class ProbeFailed(StoreUnavailable):
    """The probe raised instead of saying what happened to an earlier run. The handler did not start: deliver it again.

    It is a `StoreUnavailable`, because it has the same consequence: nothing ran, and a retry may succeed.
    """

    says = (
        "the probe failed with {problem}, so it is still not known whether attempt {attempt} happened. The handler was "
        "not started. Deliver it again, and the probe will be asked again"
    )

    # The name of the probe's own error, which is the `__cause__`.
    problem: str = ""
    attempt: int = 0


class NotInTransaction(OnefoldError):
    """`within` needs an open transaction on the connection, and the driver reports none."""


class OutcomeUnknown(OnefoldError):
    """Raised by handlers when nobody knows whether the effect happened (after a lost response, say)."""


Queue = Literal["ack", "later", "never", "later or never", "by policy", "read once", "the broker's own rule"]


class Meaning(NamedTuple):
    """The meaning of an error outside: an HTTP status, and what happens to a queue's message."""

    http: int
    queue: Queue
    retry_after: bool = False


# The single source of the table "What errors mean outside"; adapters and documentation read it.
MEANINGS: dict[type[Exception], Meaning] = {
    # Later while the guard itself refuses: no message is to blame. Never once the message or its handler is.
    UsageError: Meaning(500, "later or never"),
    MissingKey: Meaning(400, "by policy"),
    KeyReused: Meaning(422, "never"),
    InProgress: Meaning(409, "later", retry_after=True),
    Held: Meaning(409, "later"),
    InsideItself: Meaning(500, "never"),
    ClaimLost: Meaning(409, "read once"),
    ResultNotKept: Meaning(409, "ack"),
    ResultUnreadable: Meaning(409, "ack"),
    RememberedFailure: Meaning(500, "never"),
    StoreUnavailable: Meaning(503, "later", retry_after=True),
    ProbeFailed: Meaning(503, "later", retry_after=True),
    NotInTransaction: Meaning(500, "never"),
    OutcomeUnknown: Meaning(500, "the broker's own rule"),
}
