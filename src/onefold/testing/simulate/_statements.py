"""Check the invariants of `docs/guarantees.md` in every history, at each event."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from onefold._delivery import earlier_ending
from onefold._delivery.steps import Annotating, Claiming, Closing, Extending, Finishing, Reading, Releasing, StoreStep
from onefold._model import Entry, Record, State
from onefold._model.notes import DUPLICATES, RESERVED, log_of
from onefold.codecs import MsgspecCodec
from onefold.stores.memory import Row
from onefold.testing.simulate._scenario import NOW, Scenario
from onefold.testing.simulate._worker import Effect, End, Moment, Returned

if TYPE_CHECKING:
    from onefold.testing.simulate._world import Worker

# The invariants that are proved, per address, between forget, bypass and expiry.
STATEMENTS: Final = {
    1: "starts <= 1 + take-overs after a lease's end + releases + resolved reruns + unprotected runs; "
    "without a fault exactly 1",
    2: 'under hold or a probe: starts <= 1 + releases + resolved reruns + the probe\'s "not done", whatever fails; '
    "and nothing with an unknown outcome is released",
    3: "two handlers overlap only if the older claim's lease had ended by the store's clock; and unless it dies, the "
    "older one is notified",
    4: "no handler starts on a claim that was written after the record was done",
    5: "every replay returns the result of the one finish that was accepted",
    6: "a write with token T changes only a record whose token is T, and never revives one that has ended",
    7: "transactional mode, and a downstream that deduplicates on key_for: at most one effect in every history",
    8: "once faults are over and the longest lease has passed, a fresh delivery runs, replays or is held, never "
    "in progress; nothing is lost, and nobody is refused by their own claim",
    9: "once step() has returned, no later attempt runs that step again",
    10: "while a bypass runs, and after one that failed, was cancelled or died, the earlier finish stands: every "
    "ordinary duplicate replays it, or waits; a bypass that is tried again has the same downstream key",
    11: "a counted duplicate changes the count in a finished record and nothing else: no token, no result, no expiry; "
    "a record that is gone stays gone, and no delivery is counted twice",
}

_codec: Final = MsgspecCodec()

ENDED: Final = (State.DONE, State.FAILED)

SKIPPED = "(skipped)"
WITHOUT_RESULT = "(none)"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(f"{number}: {how}")
        self.number = number


class Past(msgspec.Struct, frozen=True):
    """The past events that the invariants need; counting restarts when a finished record expires."""

    starts: int = 0
    claims: int = 0
    take_overs: int = 0
    releases: int = 0
    reruns: int = 0
    not_done: int = 0
    unprotected: int = 0
    bypasses: int = 0
    # The value that the accepted ending left to be replayed.
    done: str | None = None
    keys: frozenset[str] = frozenset()
    # How often a finished record has expired.
    epoch: int = 0
    steps: frozenset[str] = frozenset()
    # The deliveries that a record has counted.
    counted: frozenset[bytes] = frozenset()


class Statements:
    """The checks, each at the event that could break it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.claims = scenario.mode == "claim"
        self.careful = self.claims and scenario.is_careful

    def _broken(self, number: int, how: str) -> None:
        if number not in self.scenario.ignoring:
            raise Violation(number, how)

    def asking(self, worker: Worker, step: StoreStep, past: Past) -> Worker:
        if worker.epoch < 0:
            worker = replace(worker, epoch=past.epoch)
        if isinstance(step, Releasing) and self.careful and worker.doubt:
            self._broken(2, "a claim was released although nobody knows whether it happened")
        if isinstance(step, Reading) and past.done is not None:
            return replace(worker, late=True)
        return replace(worker, inside=False) if isinstance(step, Closing) else worker

    def performed(self, past: Past, step: StoreStep, before: Row | None, after: Row | None, reply: Any) -> Past:
        """Check an operation of the store: invariant 6, and its change."""
        if isinstance(step, Claiming):
            return self._asked(past, step, before, after, reply)
        if before == after:
            return past
        if isinstance(step, Annotating):
            return self._counted(past, step, before, after)
        if before is None or (isinstance(step, (Closing, Extending)) and before.token != step.claim.token):
            self._broken(6, "a write with one token changed a record that has another")
        if isinstance(step, Finishing):
            return self._finished(past, before, after)
        if isinstance(step, Releasing):
            if past.done is not None:
                self._broken(4, "a finished record was released")
            return replace(past, releases=past.releases + 1)
        if isinstance(step, Extending):
            if before is None or before.state not in (State.RUNNING, State.HELD):
                self._broken(6, "a late heartbeat changed a record that had ended")
            if step.notes:
                return replace(past, steps=past.steps | (set(msgspec.msgpack.decode(step.notes)) - RESERVED))
        return past

    def _counted(self, past: Past, step: Annotating, before: Row | None, after: Row | None) -> Past:
        if before is None or after is None:
            self._broken(11, "a count wrote a record that was gone, or removed one")
            return past
        if (before.token, before.revision) != (step.record.token, step.record.revision):
            self._broken(6, "a count was written into a record that was written since it was read")
        if replace(before, notes=after.notes, revision=after.revision) != after or before.state not in ENDED:
            self._broken(11, "a count changed more than the count, or a record that had not ended")
        count, mark = log_of(after.notes)[DUPLICATES]
        if count != log_of(before.notes).get(DUPLICATES, [0])[0] + 1 or mark in past.counted:
            self._broken(11, "a delivery was counted twice")
        return replace(past, counted=past.counted | {mark})

    def _asked(self, past: Past, step: Claiming, before: Row | None, after: Row | None, reply: Any) -> Past:
        entry, replacing = step.entry, step.replacing
        borrowed = replacing is not None and replacing.token == entry.token
        if isinstance(reply, Record) and reply.token == entry.token and not borrowed:
            self._broken(8, "a delivery was refused by its own claim, and would wait for itself")
        if before == after:
            return past
        seen = None if replacing is None else (replacing.token, replacing.revision)
        if before is not None and seen != (before.token, before.revision):
            self._broken(6, "a claim replaced a record that was written since it was read")
        if self.scenario.person == "forget" and entry.state is State.OPEN and past.done is not None:
            return Past(epoch=past.epoch + 1, counted=past.counted)
        return self._claimed(past, entry, before)

    def _claimed(self, past: Past, entry: Entry, before: Row | None) -> Past:
        if past.done is not None:
            return self._bypassed(past, entry, before)
        return self._taken(past, entry, before)

    def _bypassed(self, past: Past, entry: Entry, before: Row | None) -> Past:
        """Check a claim after done: a bypass, or its restored outcome."""
        if entry.state is State.DONE and _value(entry.result) == past.done:
            return past
        if not earlier_ending.is_bypass(entry):
            self._broken(4, f"a claim ({entry.state}) was written after done")
        if _value(entry.result) != past.done:
            self._broken(10, "a bypass does not carry what it has to put back")
        return self._taken(replace(past, bypasses=past.bypasses + 1), entry, before)

    def _taken(self, past: Past, entry: Entry, before: Row | None) -> Past:
        if before is not None and entry.state is State.RUNNING and entry.token == before.token:
            # The owner of a claim records the start of its handler in it.
            return past
        if before is not None and before.state is State.RUNNING:
            if before.is_live(NOW):
                self._broken(3, "a claim was taken over before its lease had ended")
            past = replace(past, take_overs=past.take_overs + 1)
        if entry.state is State.RUNNING:
            return replace(past, claims=past.claims + 1)
        if entry.state is State.OPEN:
            return replace(past, reruns=past.reruns + 1)
        if entry.state is State.DONE:
            return replace(past, done=SKIPPED if entry.omitted else _value(entry.result))
        return past

    def _finished(self, past: Past, before: Row | None, after: Row | None) -> Past:
        if after is None or after.state is State.HELD:
            if past.done is not None:
                self._broken(10, "a bypass left a record that is held, and the earlier result is lost")
            return past
        value = SKIPPED if after.omitted else _value(after.result)
        if past.done is not None and before is not None and before.bypasses:
            # Its keys and steps have done their work: the next bypass has its own.
            return replace(past, done=value, keys=frozenset(), steps=frozenset())
        if past.done not in (None, value):
            self._broken(5, f"a second ending was accepted: {value} after {past.done}")
        return replace(past, done=value)

    def started(self, past: Past, worker: Worker, workers: tuple[Worker, ...]) -> Past:
        """Check the start of a handler: invariants 1 to 4."""
        if worker.epoch != past.epoch:
            return past
        past = replace(past, starts=past.starts + 1)
        if self.claims and worker.claim is None:
            return replace(past, unprotected=past.unprotected + 1)
        if worker.late:
            self._broken(4, "a handler started after a look that had seen done")
        if not self.claims:
            return past
        if self.scenario.bypass and not worker.bypass:
            self._broken(10, "an ordinary delivery ran although what a bypass had found was done")
        if past.starts > 1 + past.take_overs + past.releases + past.unprotected + past.reruns + past.bypasses:
            self._broken(1, f"{past.starts} starts, after {_counted(past)}")
        allowed = 1 + past.releases + past.reruns + past.not_done + past.unprotected + past.bypasses
        if self.careful and past.starts > allowed:
            self._broken(2, f"{past.starts} starts under {self.scenario.after_crash}, after {_counted(past)}")
        rivals = [(one.order, one.lapsed) for one in (*workers, worker) if one.order and (one.inside or one is worker)]
        if any(not lapsed for order, lapsed in rivals if order < max(rivals)[0]):
            self._broken(3, "two handlers run, and the lease of the older one had not ended")
        return past

    def happened(self, past: Past, worker: Worker, effect: Effect) -> Past:
        """Check an effect: invariant 7, and that no later claim repeats a finished step."""
        if effect.step in worker.steps:
            self._broken(9, f"the step {effect.step!r} was finished, and ran again")
        if effect.step:
            return past
        keys = past.keys | {effect.key}
        if len(keys) > 1:
            self._broken(7, "the system downstream got two different keys")
        return replace(past, keys=keys)

    def returned(self, past: Past, worker: Worker, moment: Returned) -> Past:
        """Note that `step()` has returned: from now on it counts as finished, whatever was stored of it."""
        return replace(past, steps=past.steps | {moment.step}) if worker.epoch == past.epoch else past

    def chosen(self, past: Past, way: str) -> Past:
        return replace(past, not_done=past.not_done + 1) if way == "not done" else past

    def ended(self, past: Past, worker: Worker) -> None:
        """Check the end of a delivery: invariants 3 and 5."""
        end = worker.at
        assert isinstance(end, End)
        own = end.kind == "outcome" and not end.replayed
        if self.claims and own and worker.overlapped and end.recorded and not worker.lost:
            self._broken(3, "another handler had started meanwhile, and the older one was not notified")
        # A probe's answer that could not be stored is marked as not recorded: there is nothing to compare.
        of_record = end.replayed and end.recorded and not end.omitted and worker.epoch == past.epoch
        accepted = worker.found if self.scenario.counts else past.done
        if end.kind == "outcome" and of_record and end.value != accepted:
            self._broken(5, f"the replay {end.value!r} is not what was accepted: {accepted!r}")

    def expired(self, past: Past, row: Row) -> Past:
        """Note that a long time has passed, and the record is gone: after an ending the counting restarts."""
        if row.state in (State.DONE, State.FAILED):
            return Past(epoch=past.epoch + 1)
        if row.state is State.RUNNING and not self.careful:
            return replace(past, take_overs=past.take_overs + 1, steps=frozenset())
        return replace(past, steps=frozenset()) if row.state is State.OPEN else past

    def over(self, past: Past, *, faults_used: int) -> None:
        """Check the end of all workers: without a fault there was exactly one start."""
        expected = 1 + past.bypasses
        if (
            self.claims
            and not faults_used
            and not self.scenario.ages
            and not self.scenario.person
            and past.starts != expected
        ):
            self._broken(1, f"{past.starts} starts without a fault")

    def settled(self, past: Past, end: Moment) -> None:
        """Check invariant 8: how the last delivery ended."""
        assert isinstance(end, End)
        if self.scenario.bypass and not (end.kind == "outcome" and end.replayed):
            self._broken(10, f"it was done before the bypass, and a fresh delivery {end.story}")
        if end.kind not in ("outcome", "Held"):
            self._broken(8, f"after all leases had ended a fresh delivery {end.story}")
        if end.kind == "outcome" and end.replayed and end.omitted:
            abandoned = past.claims > past.releases
            if self.scenario.after_crash != "skip" or not abandoned:
                self._broken(8, "the delivery is lost: it counts as done, and its only runs were released")


@functools.cache
def _value(result: bytes | None) -> str:
    return WITHOUT_RESULT if result is None else str(_codec.decode(result, Any))


def _counted(past: Past) -> str:
    return (
        f"{past.take_overs} take-overs, {past.releases} releases, {past.reruns} resolved reruns, "
        f'{past.not_done} times "not done", {past.unprotected} unprotected runs'
    )
