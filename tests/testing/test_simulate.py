"""The simulator: its invariants hold for the production code, and a store that is wrong in one place is found."""

from __future__ import annotations

import asyncio
import gc
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from onefold import Policy, Record, State, StoreUnavailable
from onefold._concurrency import interrupts as _interrupts
from onefold._concurrency.generators import Flow
from onefold._delivery import claim as claim_flow
from onefold._delivery import earlier_ending
from onefold._delivery.handler_steps import flow as step_flow
from onefold._delivery.steps import Annotating, Reading
from onefold._model.notes import with_one_more
from onefold.codecs import MsgspecCodec
from onefold.stores.base import GONE
from onefold.stores.memory import MemoryStore, _record
from onefold.testing.simulate import EVERYDAY, Report, Scenario, Story, _scenario, read_code, search, tell
from tests.support import PROJECT, values_of

EXPLORED: dict[Scenario, Report] = {}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_garbage() -> Iterator[None]:
    """Leave the collector off: a search keeps every world that it has seen, and none of them is in a cycle."""
    gc.disable()
    yield
    gc.enable()


def has_many_histories(scenario: Scenario) -> bool:
    """Whether a probe meets two faults and something else: these few scenarios are most of all histories."""
    return scenario.after_crash == "probe" and scenario.faults > 1 and scenario != Scenario(after_crash="probe")


def named(scenario: Scenario) -> Any:
    name = scenario.name.replace(", ", "-").replace(" ", "_")
    return pytest.param(scenario, id=name, marks=[pytest.mark.more] if has_many_histories(scenario) else [])


@pytest.mark.parametrize("scenario", [named(scenario) for scenario in EVERYDAY])
def test_every_invariant_holds_in_every_history(scenario: Scenario) -> None:
    report = EXPLORED[scenario] = search(scenario)

    assert report.story is None, f"\n{report.story}"
    assert report.states > 100


def test_every_word_of_a_policy_is_simulated() -> None:
    policies = [scenario.policy for scenario in EVERYDAY]

    for field in ("after_crash", "mode", "store_down"):
        assert values_of(field) <= {getattr(policy, field) for policy in policies}, field


@pytest.mark.more
def test_the_readme_has_the_numbers() -> None:
    if len(EXPLORED) < len(EVERYDAY):
        pytest.skip("only a part of the scenarios was explored in this run")
    histories = sum(report.histories for report in EXPLORED.values())
    states = sum(report.states for report in EXPLORED.values())
    readme = " ".join((PROJECT / "README.md").read_text(encoding="utf-8").split())

    assert f"{histories:,} histories ({states:,} states) in {len(EVERYDAY)} scenarios" in readme


class WithoutRevisionCheck(MemoryStore):
    def _is_still(self, row: Any, replacing: Any) -> bool:
        return bool(row.token == replacing.token)


class WithRestartingRevision(MemoryStore):
    """Only the revision is compared, and it begins anew with each claim."""

    def _is_still(self, row: Any, replacing: Any) -> bool:
        return bool(row.revision == replacing.revision)


class WithoutTokenCheck(MemoryStore):
    def _mine(self, claim: Any, now: float) -> Any:
        return self._alive(claim.address, now)


class WithReleaseOfAnybody(MemoryStore):
    def _release(self, claim: Any, released: Any, now: float) -> bool:
        row = self._alive(claim.address, now)
        return super()._release(claim if row is None else replace(claim, token=row.token), released, now)


class WithForgottenTokens(MemoryStore):
    """A claim does not know its own token again."""

    def _claim(self, entry: Any, replacing: Any, now: float) -> Any:
        row = self._alive(entry.address, now)
        if row is not None and entry.is_own(row.token, replacing):
            return _record(entry.address, row, now)
        return super()._claim(entry, replacing, now)


class WithExpiringHolds(MemoryStore):
    def _claim(self, entry: Any, replacing: Any, now: float) -> Any:
        return super()._claim(replace(entry, ttl=100.0) if entry.state is State.HELD else entry, replacing, now)


class WithClaimsOverNothing(MemoryStore):
    """What was decided about a record is written although the record has gone."""

    def _claim(self, entry: Any, replacing: Any, now: float) -> Any:
        gone = self._alive(entry.address, now) is None
        return super()._claim(entry, None if gone else replacing, now)


class WithRevivingHeartbeat(MemoryStore):
    """A late heartbeat makes a finished record run again."""

    def _extend(self, claim: Any, notes: Any, now: float) -> bool:
        row = self._mine(claim, now)
        if row is not None and row.state is State.DONE:
            self._rows[claim.address] = replace(row, state=State.RUNNING)
        return super()._extend(claim, notes, now)


class WithAnotherResult(MemoryStore):
    """Replays something else than what was stored."""

    def _claim(self, entry: Any, replacing: Any, now: float) -> Any:
        found = super()._claim(entry, replacing, now)
        if isinstance(found, Record) and found.result is not None:
            return replace(found, result=MsgspecCodec().encode("another result", str))
        return found


class WithLostNotes(MemoryStore):
    def _claim(self, entry: Any, replacing: Any, now: float) -> Any:
        return super()._claim(replace(entry, notes=None), replacing, now)


class WithLateNotes(MemoryStore):
    """A log of steps that was given up, and lands late, is written over a newer one."""

    def _extend(self, claim: Any, notes: Any, now: float) -> bool:
        ours = super()._extend(claim, notes, now)
        if ours and notes is not None:
            self._rows[claim.address] = replace(self._rows[claim.address], notes=notes)
        return ours


class WithCountsOverNothing(MemoryStore):
    """A duplicate is counted in a record that has gone meanwhile."""

    def annotate(self, record: Any, notes: bytes) -> Any:
        answer = super().annotate(record, notes)
        return self.claim(replace(record, notes=notes).as_entry(record.token)) if answer is GONE else answer


class WithCountsThatProlong(MemoryStore):
    def annotate(self, record: Any, notes: bytes) -> Any:
        answer = super().annotate(record, notes)
        if answer is None:
            self._rows[record.address] = replace(self._rows[record.address], expires=10_000.0)
        return answer


class WithCountsInAnyRecord(MemoryStore):
    def annotate(self, record: Any, notes: bytes) -> Any:
        found = self.read(record.address)
        return None if found is None else super().annotate(found, notes)


def story_of(store: Callable[..., MemoryStore] = MemoryStore, **scenario: Any) -> Story:
    story = search(Scenario(store=store, **scenario)).story
    assert story is not None, "nothing was found"
    return story


def test_without_the_revision_check_a_live_claim_is_taken_over() -> None:
    story = story_of(WithoutRevisionCheck)

    assert str(story) == plain("""
        claim, rerun, 2 workers, 2 faults:
          1. worker 1 claims [running, worker 1 token 1, revision 1]
          2. worker 1 is watched by its heartbeat
          3. the lease ends
          4. worker 2 claims [nothing changed]
          5. worker 1 sends a heartbeat [running, worker 1 token 1, revision 2]
          6. worker 2 takes over
             invariant 6: a claim replaced a record that was written since it was read
    """)


def test_a_bypass_that_forgets_what_it_found_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_ending, "carrying", lambda entry, found: replace(entry, bypasses=found.bypasses + 1))

    assert story_of(bypass=True).number == 4
    assert story_of(bypass=True, ignoring=frozenset({4})).number == 10


def test_a_dead_bypass_that_takes_what_was_done_along_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_ending, "finished", lambda _found: None)

    assert story_of(bypass=True, ignoring=frozenset({4, 5})).number == 10


def test_a_step_that_returns_before_its_log_is_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(_tell: Any, _claim: Any, step: Any, _what: str) -> Flow[Any]:
        try:
            return (yield step)
        except StoreUnavailable:
            return True

    monkeypatch.setattr(step_flow, "insist", once)

    story = story_of(steps=("reserve",))

    assert story.number == 9
    assert "goes on after its step" in str(story)


def test_with_a_revision_that_restarts_a_stale_take_over_hits_another() -> None:
    story = story_of(WithRestartingRevision, workers=3)

    assert str(story) == plain("""
        claim, rerun, 3 workers, 2 faults:
          1. worker 1 claims [running, worker 1 token 1, revision 1]
          2. the lease ends
          3. worker 2 claims [nothing changed]
          4. worker 3 claims [nothing changed]
          5. worker 2 takes over [running, worker 2 token 1, revision 1]
          6. worker 3 takes over
             invariant 6: a claim replaced a record that was written since it was read
    """)


def test_without_the_token_check_a_zombie_writes_over_its_successor() -> None:
    story = story_of(WithoutTokenCheck)

    assert str(story) == plain("""
        claim, rerun, 2 workers, 2 faults:
          1. worker 1 claims [running, worker 1 token 1, revision 1]
          2. worker 2 claims: the store does not answer
          3. worker 2 releases
             invariant 6: a write with one token changed a record that has another
    """)


def test_with_a_release_that_ignores_the_owner_a_finished_record_is_lost() -> None:
    story = story_of(WithReleaseOfAnybody, ignoring=frozenset({6}))

    assert str(story) == plain("""
        claim, rerun, 2 workers, 2 faults:
          1. worker 1 claims [running, worker 1 token 1, revision 1]
          2. worker 1 is watched by its heartbeat
          3. worker 1 starts the handler
          4. worker 1 does the effect
          5. worker 1 sees that the handler returns
          6. worker 1 finishes [done, worker 1 token 1, revision 2]; it gets its own worker 1's result of attempt 1
          7. worker 2 claims: the store does not answer
          8. worker 2 releases
             invariant 4: a finished record was released
    """)


def test_with_a_claim_that_does_not_know_its_own_token_a_delivery_waits_for_itself() -> None:
    story = story_of(WithForgottenTokens)

    assert str(story) == plain("""
        claim, rerun, 2 workers, 2 faults:
          1. worker 1 claims: the answer is lost, and the client library sends it again
             invariant 8: a delivery was refused by its own claim, and would wait for itself
    """)


def test_with_an_expiring_held_record_a_charge_runs_again_silently() -> None:
    story = story_of(WithExpiringHolds, after_crash="hold", ages=True)

    assert str(story) == plain("""
        claim, hold, 2 workers, 2 faults, a long time:
          1. worker 1 claims [running, worker 1 token 1, revision 1]
          2. worker 1 is watched by its heartbeat
          3. worker 1 starts the handler
          4. worker 1 dies before it does the effect
          5. the lease ends
          6. worker 2 claims [nothing changed]
          7. worker 2 writes held [held, worker 1 token 1, revision 2]; it gets Held
          8. a long time passes
          9. the last delivery claims [running, the last delivery token 1, revision 1]
         10. the last delivery is watched by its heartbeat
             invariant 2: 2 starts under hold, after 1 take-overs, 0 releases, 0 resolved reruns, 0 times "not done", 0 unprotected runs
    """)  # noqa: E501 - the story as it is printed


def test_with_claims_over_nothing_a_released_delivery_is_lost() -> None:
    story = story_of(WithClaimsOverNothing, after_crash="skip")

    assert "invariant 8: the delivery is lost" in str(story)


def test_with_a_reviving_heartbeat_a_finished_record_is_taken_over() -> None:
    story = story_of(WithRevivingHeartbeat, ignoring=frozenset({6}))

    assert story.lines[-1] == "worker 2 takes over"
    assert "invariant 4: a claim (running) was written after done" in str(story)


def test_a_store_that_loses_records_breaks_invariants_1_and_2() -> None:
    first = story_of(loses=True)
    second = story_of(loses=True, after_crash="hold", ignoring=frozenset({1}))

    assert (first.number, second.number) == (1, 2)
    assert "the store loses the record" in first.lines
    assert "the store loses the record" in second.lines


@pytest.mark.parametrize(
    ("number", "defect"),
    [
        (3, {"store": WithoutRevisionCheck, "ignoring": frozenset({6})}),
        (5, {"store": WithAnotherResult}),
        (9, {"store": WithLostNotes, "steps": ("reserve",)}),
        (11, {"store": WithCountsOverNothing, "counts": True, "ages": True}),
        (11, {"store": WithCountsOverNothing, "counts": True, "person": "forget"}),
        (11, {"store": WithCountsThatProlong, "counts": True}),
        (6, {"store": WithCountsInAnyRecord, "counts": True, "workers": 3}),
        (11, {"store": WithCountsInAnyRecord, "counts": True, "bypass": True, "ignoring": frozenset({6})}),
        (9, {"store": WithLateNotes, "steps": ("reserve", "pay"), "late": True, "beats": 0}),
    ],
)
def test_every_invariant_can_fail(number: int, defect: dict[str, Any]) -> None:
    assert story_of(**defect).number == number


def test_a_count_that_is_tried_again_after_a_failure_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def insisting(delivery: Any, found: Record) -> Flow[None]:
        mark = delivery.mint()
        for _ in range(2):
            notes = with_one_more(found.notes, mark)
            assert notes is not None
            try:
                yield Annotating(found, notes)
            except StoreUnavailable:
                found = yield Reading(found.address)
                continue
            return

    monkeypatch.setattr(claim_flow, "count", insisting)

    story = story_of(counts=True)

    assert story.number == 11
    assert "counts a duplicate: done, but the answer is lost" in str(story)


def test_one_token_for_two_transactions_commits_the_effect_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim of the second transaction would take the first one's record for its own, and run again."""
    make_delivery = _scenario._make_delivery

    def delivery(name: str, policy: Policy, *, bypass: bool = False) -> Any:
        return replace(make_delivery(name, policy, bypass=bypass), mint=name.encode)

    monkeypatch.setattr(_scenario, "_make_delivery", delivery)

    story = story_of(mode="transactional")

    assert story.number == 7
    assert "worker 1 commits: done, but the answer is lost" in str(story)


def test_a_story_can_be_run_again_from_its_text() -> None:
    story = story_of(loses=True)

    scenario, actions = read_code(story.code)

    assert str(tell(scenario, actions)) == str(story)


def test_the_simulator_explores_each_world_once() -> None:
    report = search(Scenario(workers=3, faults=0))

    assert report.histories > report.states > 0


def plain(text: str) -> str:
    return textwrap.dedent(text).strip()


def test_an_operation_that_is_sent_again_inside_a_transaction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: the record was committed alone, and the effect was lost."""

    async def repeating(step: Any, store: Any, _interrupt: Any) -> Any:
        try:
            return await step.send(store), None, None
        except asyncio.CancelledError as interrupt:
            return await _interrupts._ask_again(step, store, interrupt)

    monkeypatch.setattr(_interrupts, "_ask_inside", repeating)

    story = story_of(mode="transactional", cancels=True, workers=1, faults=1)

    assert str(story) == plain("""
        transactional, 1 workers, 1 faults, cancelled tasks:
          1. worker 1 begins [nothing changed]
          2. worker 1 writes done, and is cancelled once, rolled back
          3. worker 1 writes done
             invariant 7: a statement was sent outside of a transaction, where it is committed by itself
    """)
