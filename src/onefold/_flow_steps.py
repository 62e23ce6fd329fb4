"""The log of a handler's finished steps, so that the next attempt does not repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from onefold._bypass import EARLIER
from onefold._flow import claim_of, insist
from onefold._model import Entry
from onefold._steps import Ended, Extending, Flow, Running
from onefold.codecs import Codec, Unreadable, type_name
from onefold.errors import ClaimLost, OutcomeUnknown, UsageError
from onefold.events import Kind, Teller

# A log is written whole with each step, so it has to stay small.
STEPS_MAX: Final = 100
NOTES_BYTES_MAX: Final = 262_144

MAY_RETURN: Final = (
    "Let a step return None, numbers, texts, bytes, and lists or dictionaries of them, or pass returns= with its type"
)


class StepLog:
    """What one handler has finished so far: results by name, `None` where a result could not be kept."""

    def __init__(self, entry: Entry, codec: Codec, tell: Teller) -> None:
        self.entry = entry
        self.codec = codec
        self.tell = tell
        self.notes = entry.notes
        self._results: dict[str, bytes | None] = msgspec.msgpack.decode(entry.notes) if entry.notes else {}

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def check(self, name: str) -> None:
        if not name or not isinstance(name, str):
            raise UsageError(f"a step's name={name!r} has to be a text such as 'reserve'")
        if len(self._results) - (EARLIER in self._results) >= STEPS_MAX and name not in self._results:
            raise UsageError(f"{self.entry.address.operation}: more than STEPS_MAX={STEPS_MAX} steps in one handler")

    def add(self, name: str, value: Any, returns: Any) -> None:
        """Write the step down. A result that cannot be kept leaves only the fact that it is finished."""
        try:
            self._results[name] = self.codec.encode(value, returns)
        except Exception:  # noqa: BLE001 - the step happened, whatever its value is
            self._leave_out(name, value, "which cannot be stored")
        self.notes = msgspec.msgpack.encode(self._results)
        if len(self.notes) > NOTES_BYTES_MAX:
            self._leave_out(name, value, f"with which the log has more than NOTES_BYTES_MAX={NOTES_BYTES_MAX} bytes")
            self.notes = msgspec.msgpack.encode(self._results)

    def _leave_out(self, name: str, value: Any, why: str) -> None:
        self._results[name] = None
        kind = type_name(type(value))
        words = f"the step {name!r} returned {kind}, {why}: no later attempt can go on from it. {MAY_RETURN}"
        self.tell.warn(self.entry.address, words, about=f"a step's {kind}")

    def replay(self, name: str, returns: Any) -> Any:
        """Return what the step returned. Raises `UsageError`, which nobody takes for the end of the delivery."""
        stored = self._results[name]
        if stored is None:
            raise self._not_replayed(name, f"its value could not be stored. {MAY_RETURN}")
        try:
            return self.codec.decode(stored, returns)
        except Unreadable as error:
            expected = f"its stored value does not fit {type_name(returns)} ({error})"
            advice = "Keep the type able to read what it wrote, or pass returns= with the type that wrote it"
            raise self._not_replayed(name, f"{expected}. {advice}") from error

    def _not_replayed(self, name: str, why: str) -> UsageError:
        address = self.entry.address
        return UsageError(
            f"{address.operation} [key {address.digest}]: the step {name!r} was finished by an earlier attempt, but "
            f"{why}. It did not run again, and this delivery is not done: a step of another name runs afresh, and "
            "`onefold resolve` settles the whole delivery"
        )


def take_step(log: StepLog, name: str, call: Callable[[], Any], returns: Any) -> Flow[Any]:
    """Run one named part of a handler, unless an earlier attempt has finished it: then replay its result."""
    log.check(name)
    if name in log:
        return log.replay(name, returns)
    ended: Ended = yield Running(call)
    if ended.error is not None:
        raise ended.error
    log.add(name, ended.value, returns)
    yield from _write_down(log, name, ended.value)
    return ended.value


def _write_down(log: StepLog, name: str, value: Any) -> Flow[None]:
    """Keep the log before the handler goes on: only then does no later attempt run this step again."""
    entry = log.entry
    claim = claim_of(entry)
    kept = yield from insist(log.tell, claim, Extending(claim, log.notes), f"step {name}")
    if kept is False:
        log.tell(Kind.LOST, entry.address, entry.attempt, f"step {name}")
        raise ClaimLost.about(entry.address, value=value)
    if isinstance(kept, Exception):
        log.tell(Kind.NOT_REMEMBERED, entry.address, entry.attempt, f"step {name}")
        raise OutcomeUnknown(
            f"{entry.address.operation} [key {entry.address.digest}]: the step {name!r} has run, but the store could "
            f"not be told of it within the lease ({type(kept).__name__}: {kept}). Let this run end here: if its end "
            "cannot be told either, the next attempt runs the step again"
        ) from kept
