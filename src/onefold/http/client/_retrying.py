"""Decide when a request is sent again, how long to wait, and what to report. Pure: `tenacity` counts and waits."""

from __future__ import annotations

import email.utils
import random
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from onefold import UsageError
from onefold.http._shared.messages import REFUSED

try:
    import tenacity
except ImportError as error:
    raise UsageError("the client's retries need tenacity, which is missing. pip install 'onefold[client]'") from error

HEADER: Final = "Idempotency-Key"

# The methods that are dangerous to repeat; the others are passed on unchanged.
METHODS: Final = frozenset({"POST", "PATCH"})

# A response up to this size is read before it is returned, if its length is known, or if it is a problem document: one
# that breaks off is requested again.
ANSWER_MAX: Final = 1 << 20

# A problem document is shorter; a longer one is not decoded, because it could be anything.
PROBLEM_MAX: Final = 1 << 16

# A Content-Length with more digits is invalid; Python refuses to parse thousands of digits.
LENGTH_DIGITS_MAX: Final = 15

# Longer than any server remembers a key. A longer pause is a mistake, and the clock cannot wait forever.
PAUSE_SECONDS_MAX: Final = 24 * 3600.0

# Pauses reach any maximum before that: 2 to the power of a large number is not a float.
DOUBLINGS_MAX: Final = 60

CONFLICT: Final = 409
SERVER_ERROR: Final = 500

# Retried at once, or after a while. A conflict without Retry-After waits for a person.
AGAIN: Final = frozenset({408, 425})
AGAIN_IF_ASKED_TO: Final = frozenset({CONFLICT, 429})

# After these the same request may get another response, here or at the redirect's target: an intent continues.
UNSETTLED: Final = frozenset({307, 308, 401, 403, 408, 425, 429})

# Our own problem codes for a request that is done, or failed, for good.
SETTLED_CODES: Final = frozenset({"result_not_kept", "failed"})


class Retries(msgspec.Struct, frozen=True):
    """How often to retry, and how patiently. Pauses double from `pause` to `pause_max`, plus jitter and `Retry-After`.

    Raises `UsageError` for invalid values. Pauses are seconds.
    """

    attempts: int = 5
    pause: float = 0.2
    pause_max: float = 10.0
    # A server that asks for more does not expect a client to wait.
    retry_after_max: float = 60.0

    def __post_init__(self) -> None:
        attempts: object = self.attempts
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise UsageError(f"attempts={attempts!r:.60} has to be 1 or more: 1 sends once, and never again")
        for name in ("pause", "pause_max", "retry_after_max"):
            pause: object = getattr(self, name)
            is_number = isinstance(pause, (int, float)) and not isinstance(pause, bool)
            if not is_number or not 0 <= pause <= PAUSE_SECONDS_MAX:  # type: ignore[operator]
                raise UsageError(f"{name}={pause!r:.60} has to be seconds, such as {name}=0.2, and a day at most")


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: the status or the error that came back. `sent`: whether anything was sent."""

    status: int | None = None
    error: str | None = None
    # False: no connection was made, or none was free. The server has seen nothing of this attempt.
    sent: bool = True


class Sent(msgspec.Struct, frozen=True):
    """The history of one call: its key, every attempt, and whether its response is a replay."""

    key: str
    attempts: list[Attempt]
    replayed: bool = False


class Wanted(Exception):
    """Raised for a response that has to be requested again; it carries the response."""

    def __init__(self, response: Any, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"status {status}")
        self.response = response
        self.retry_after = retry_after(headers)


def mint() -> str:
    """Create a new key in the form of the draft: a quoted string."""
    return f'"{uuid.uuid4()}"'


def is_wanted_again(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether a retry may get a better response."""
    if status in AGAIN_IF_ASKED_TO:
        return "Retry-After" in headers
    return status >= SERVER_ERROR or status in AGAIN


def settles(status: int, headers: Mapping[str, str], body: bytes | None = b"") -> bool:
    """Return whether this key is settled for good, so that an intent may end.

    The body is the decoded one; it counts only in a problem document. None: it could not be read.
    """
    # A server that refuses in its own words names the code in a header.
    code = headers.get(REFUSED) or (_code_of(body) if is_problem(headers) else "")
    if code is None:
        # It may be any problem, such as a key that was used for another request.
        return False
    if code:
        return code in SETTLED_CODES
    if status == CONFLICT:
        # A first response may be the handler's own, or a guard's: we cannot tell.
        return is_replay(headers)
    return status < SERVER_ERROR and status not in UNSETTLED


def is_problem(headers: Mapping[str, str]) -> bool:
    return (headers.get("Content-Type") or "").partition(";")[0].strip().lower() == "application/problem+json"


def is_replay(headers: Mapping[str, str]) -> bool:
    return headers.get("Idempotent-Replayed") == "true"


def is_short(headers: Mapping[str, str]) -> bool:
    """Return whether the body is known to be short enough to read at once."""
    length = headers.get("Content-Length") or ""
    return length.isdecimal() and len(length) <= LENGTH_DIGITS_MAX and int(length) <= ANSWER_MAX


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that the server asks for, in either form of the header: at most PAUSE_SECONDS_MAX."""
    value = (headers.get("Retry-After") or "").strip()
    try:
        asked = float(value) if value.isdecimal() else _seconds_until(email.utils.parsedate_to_datetime(value))
    except (ValueError, TypeError, OverflowError):
        # Not a date, or an impossible one.
        return 0.0
    return min(max(asked, 0.0), PAUSE_SECONDS_MAX)


def _seconds_until(moment: datetime) -> float:
    # "-0000": the time is in UTC, in an unknown zone.
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


def plan(retries: Retries, lost: tuple[type[BaseException], ...], but: tuple[type[BaseException], ...] = ()) -> Any:
    """Return the arguments for tenacity: these errors are lost connections, except those in `but`."""
    given: object = retries
    if not isinstance(given, Retries):
        raise UsageError(f"retries={given!r:.60} is not a Retries: write retries=Retries(attempts=5)")

    def again(error: BaseException) -> bool:
        return isinstance(error, (Wanted, *lost)) and not isinstance(error, but)

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = min(error.retry_after, retries.retry_after_max) if isinstance(error, Wanted) else 0.0
        pause: float = min(retries.pause * 2 ** min(state.attempt_number - 1, DOUBLINGS_MAX), retries.pause_max)
        return asked + random.uniform(pause / 2, pause)  # noqa: S311 - jitter is no secret

    return {
        "stop": tenacity.stop_after_attempt(retries.attempts),
        "wait": wait,
        "retry": tenacity.retry_if_exception(again),
        "reraise": True,
    }


def resumed(plan: Any, retries: Retries, call: ClientCall) -> Any:
    """Return the arguments for tenacity after a response broke off: its error counts as the first attempt."""
    return {**plan, "stop": tenacity.stop_after_attempt(retries.attempts - len(call.attempts) + 1)}


class ClientCall:
    """One call in progress: its key, and its attempts so far."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.attempts: list[Attempt] = []

    def answered(self, response: Any, status: int, headers: Mapping[str, str]) -> None:
        """Note the response. Raise `Wanted` if it has to be requested again."""
        self.attempts.append(Attempt(status=status))
        if is_wanted_again(status, headers):
            raise Wanted(response, status, headers)

    def failed(self, error: BaseException, *, sent: bool) -> None:
        self.attempts.append(Attempt(error=type(error).__name__, sent=sent))

    def broke_off(self, error: BaseException) -> None:
        """Note that the last response, already returned, was not received in whole."""
        self.attempts[-1] = Attempt(error=type(error).__name__)

    def sent(self, headers: Mapping[str, str]) -> Sent:
        # Not a copy: a response that breaks off while its body is read is requested again.
        return Sent(self.key, self.attempts, replayed=is_replay(headers))

    def gave_up(self, error: BaseException) -> None:
        """Attach the history of the call to the last error."""
        error.onefold = self.sent({})  # type: ignore[attr-defined]
        sent = sum(attempt.sent for attempt in self.attempts)
        if not sent:
            error.add_note(f"onefold: tried {len(self.attempts)} times, and nothing was sent: no connection was made")
            return
        error.add_note(
            f"onefold: sent {sent} times, and the outcome is not known. Retry with the same key, inside the same intent"
        )


def unwanted(state: tenacity.RetryCallState) -> Any:
    """Return the response that is requested again, if any: release it before waiting for the next one."""
    error = state.outcome.exception() if state.outcome is not None else None
    return error.response if isinstance(error, Wanted) else None


def let_go(state: tenacity.RetryCallState) -> None:
    """Close the response that is requested again: it must not hold its connection while nobody reads from it."""
    response = unwanted(state)
    if response is not None:
        response.close()


def _code_of(problem: bytes | None) -> str | None:
    """Return the code of one of our problems, "" for others; None if it was not read."""
    if problem is None:
        return None
    try:
        found = msgspec.json.decode(problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(found.get("code") or "") if isinstance(found, dict) else ""
