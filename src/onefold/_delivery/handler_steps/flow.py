"""Keep the log of a handler's finished steps, so that the next attempt does not repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from onefold._concurrency.generators import Flow
from onefold._delivery.close import insist
from onefold._delivery.handler_steps.left import StepsLeft
from onefold._delivery.handler_steps.log_writes import Logging, Turns
from onefold._delivery.steps import Ended, Running
from onefold._delivery.work import as_bytes, encoded_again
from onefold._model import Address, Entry
from onefold._model.notes import RESERVED
from onefold.codecs import Codec, Unreadable, type_name
from onefold.errors import ClaimLost, OutcomeUnknown, UsageError, although_it_ran
from onefold.events import Kind, Teller

# The whole log is written with each step, so it has to stay small.
STEPS_MAX: Final = 100
NOTES_BYTES_MAX: Final = 262_144

MAY_RETURN: Final = (
    "Let a step return None, numbers, strings, bytes, and lists or dictionaries of them, or pass returns= with its type"
)


class LateStep(ClaimLost):
    """A step ended after its handler had, and its entry is in no log. `value` is what it returned."""

    says = (
        "the step {step!r} finished after its handler had ended, so it is in no log. Wait for every step before the "
        "handler ends. Its return value is in error.value"
    )


def handler_ended(address: Address, name: str) -> UsageError:
    """Create the error of a step that is begun too late."""
    return UsageError(
        f"{address.operation} [key {address.digest}]: the handler of this delivery has ended, and a step belongs to "
        f"its handler: the step {name!r} did not run. Wait for it in the handler, or give it a delivery of its own "
        "(guard.run)"
    )


class StepLog:
    """The steps that one handler has finished so far: results by name, `None` if a result could not be kept.

    Threads or tasks of the handler may run steps concurrently.
    """

    def __init__(self, entry: Entry, codec: Codec, tell: Teller) -> None:
        self.entry = entry
        self.codec = codec
        self.tell = tell
        self.turns = Turns()
        self._results: dict[str, bytes | None] = msgspec.msgpack.decode(entry.notes) if entry.notes else {}
        self._notes = entry.notes
        # The names of the steps in the newest log that the store has.
        self._kept = frozenset(self._results)
        # The steps that have begun and not ended yet, and those that were interrupted.
        self._under_way: set[str] = set()
        self._interrupted: set[str] = set()
        # Whether the handler has ended: no step may begin any more.
        self._ended = False

    @property
    def notes(self) -> bytes | None:
        """Return the newest log."""
        return self._notes

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def check_room(self, name: str) -> None:
        """Refuse a new step where the handler has had too many."""
        if len(self._results.keys() - RESERVED) >= STEPS_MAX and name not in self._results:
            raise UsageError(f"{self.entry.address.operation}: more than STEPS_MAX={STEPS_MAX} steps in one handler")

    @property
    def has_ended(self) -> bool:
        """Return whether the handler has ended."""
        return self._ended

    def begin(self, name: str) -> None:
        """Note that a step begins. Raise `UsageError` once its handler has ended."""
        with self.turns.adding:
            if self._ended:
                raise handler_ended(self.entry.address, name)
            self._under_way.add(name)

    def fail(self, name: str, error: BaseException) -> None:
        """Note that a step has raised. A step that an interrupt has stopped may have happened anyway."""
        with self.turns.adding:
            self._under_way.discard(name)
            if not isinstance(error, Exception):
                self._interrupted.add(name)

    def add(self, name: str, value: Any, returns: Any) -> None:
        """Add a finished step. A result that cannot be kept leaves only the fact that the step is finished.

        It does not matter whether its handler has ended meanwhile. A claim that ends with a log instead of a result is
        ended only when no step is in progress: otherwise it is left alone, and the store knows whether it is still
        ours.
        """
        stored, problem = None, ""
        struck: list[BaseException] = []
        try:
            try:
                stored = as_bytes(self.codec.encode(value, returns))
            except BaseException as first:  # noqa: BLE001 - raised below
                stored = encoded_again(self.codec, value, returns, first, struck)
        except Exception:  # noqa: BLE001 - the step happened, whatever its value is
            problem = "which cannot be stored"
        with self.turns.adding:
            notes = msgspec.msgpack.encode({**self._results, name: stored})
            if len(notes) > NOTES_BYTES_MAX:
                problem = f"with which the log has more than NOTES_BYTES_MAX={NOTES_BYTES_MAX} bytes"
                stored = None
                notes = msgspec.msgpack.encode({**self._results, name: None})
            self._results[name] = stored
            self._notes = notes
            self._under_way.discard(name)
            # It was interrupted before, and retried.
            self._interrupted.discard(name)
        if problem:
            self._tell_left_out(name, value, problem)
        if struck:
            # The end of the handler writes the log.
            raise struck[0]

    def unwritten(self, name: str) -> bytes | None:
        """Return the newest log if it has to be written; None if the store has one that includes this step."""
        return None if name in self._kept else self._notes

    def written(self, notes: bytes, *, kept: bool) -> bool:
        """Note whether the store has kept this log."""
        if kept:
            self._kept = frozenset(msgspec.msgpack.decode(notes, type=dict[str, msgspec.Raw]))
        return kept

    def end(self) -> tuple[bytes | None, StepsLeft]:
        """Return the log with which the handler ends, and the steps whose outcome is unknown.

        Whatever releases or holds the claim carries the whole log.
        """
        with self.turns.adding:
            self._ended = True
            return self._notes, StepsLeft(tuple(sorted(self._under_way)), tuple(sorted(self._interrupted)))

    def _tell_left_out(self, name: str, value: Any, why: str) -> None:
        kind = type_name(type(value))
        text = f"the step {name!r} returned {kind}, {why}: no later attempt can continue from it. {MAY_RETURN}"
        self.tell.warn(self.entry.address, text, about=f"a step's {kind}")

    def replay(self, name: str, returns: Any) -> Any:
        """Return what the step returned. Raise `UsageError`, which is never taken for the end of the delivery."""
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
            f"{why}. It did not run again, and this delivery is not done: under another name the step runs, and "
            "`onefold resolve` settles the whole delivery"
        )


def take_step(log: StepLog, name: str, call: Callable[[], Any], returns: Any) -> Flow[Any]:
    """Run one named part of a handler, unless an earlier attempt has finished it: then replay its result."""
    log.check_room(name)
    if name in log:
        value = log.replay(name, returns)
        if log.unwritten(name) is not None:
            # It ran in this very attempt, but its log could not be stored: it raised, and is run again.
            yield from _write_down(log, name, value)
        return value
    log.begin(name)
    try:
        ended: Ended = yield Running(call)
        if ended.error is not None:
            raise ended.error
    except BaseException as error:
        log.fail(name, error)
        raise
    log.add(name, ended.value, returns)
    yield from _write_down(log, name, ended.value)
    return ended.value


def _write_down(log: StepLog, name: str, value: Any) -> Flow[None]:
    """Store the log before the handler continues: only then will no later attempt run this step again."""
    entry = log.entry
    claim = entry.as_claim()
    kept = yield from insist(log.tell, claim, Logging(claim, log, name), f"step {name}")
    if kept is False:
        raise _lost(log, name, value)
    if isinstance(kept, Exception):
        log.tell(Kind.NOT_RECORDED, entry.address, entry.attempt, f"step {name}")
        why = although_it_ran(f"{type(kept).__name__}: {kept}")
        raise OutcomeUnknown(
            f"{entry.address.operation} [key {entry.address.digest}]: the step {name!r} has run, but the store could "
            f"not record it within the lease ({why}). Let this run end here: if its end cannot be recorded either, the "
            "next attempt runs the step again"
        ) from kept


def _lost(log: StepLog, name: str, value: Any) -> ClaimLost:
    """Create the error for a lost claim, or for a handler that ended while one of its tasks or threads continued."""
    log.tell(Kind.LOST, log.entry.address, log.entry.attempt, f"step {name}")
    if log.has_ended:
        return LateStep.about(log.entry.address, step=name, value=value)
    return ClaimLost.about(log.entry.address, value=value)
