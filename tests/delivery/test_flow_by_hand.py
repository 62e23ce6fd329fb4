"""Flows, step by step: what a flow makes of an answer that a store gives rarely."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec
import pytest

from onefold import OutcomeUnknown, Policy, StoreUnavailable
from onefold._concurrency.generators import Flow
from onefold._delivery.close import insist
from onefold._delivery.handler_steps.flow import StepLog, take_step
from onefold._delivery.joined import RETRY_PAUSE_MAX, TRANSACTIONS_MAX, transact
from onefold._delivery.seen import write_seen
from onefold._delivery.steps import (
    Beginning,
    Claiming,
    Committing,
    Ended,
    Finishing,
    LeaseLeft,
    Pausing,
    RollingBack,
    Running,
    Took,
)
from onefold._delivery.work import Delivery
from onefold._model import GONE, Claim, Commit, DeliveryRequest, Ending, Entry, Record, State
from onefold.codecs import MsgspecCodec
from onefold.events import Teller
from onefold.keys import address
from tests.support import Heard

ADDRESS = address("charge", "pay_1")


def delivery(heard: Heard, **policy: Any) -> Delivery:
    return Delivery(
        request=DeliveryRequest(ADDRESS),
        policy=Policy(**policy),
        call=lambda: "paid",
        returns=str,
        codec=MsgspecCodec(),
        tell=Teller(heard),
        mint=lambda: os.urandom(16),
    )


class Hand:
    """Sends a flow its replies, and says what it asked for."""

    def __init__(self, flow: Flow[Any]) -> None:
        self._flow = flow
        self.step: Any = flow.send(None)
        self.value: Any = None

    def reply(self, answer: Any) -> Any:
        """Return the next step; None: it has ended, and `value` is its answer."""
        try:
            self.step = self._flow.send(answer)
        except StopIteration as end:
            self.step, self.value = None, end.value
        return self.step

    def fail_for_good(self, error: Exception) -> None:
        """Give it this error of the store, which no further transaction would mend."""
        if isinstance(self.fail(error), RollingBack):
            self.reply(False)

    def fail(self, error: Exception) -> Any:
        """Return the next step after this error of the store."""
        self.step = self._flow.throw(error)
        return self.step


def record_of(entry: Entry) -> Record:
    """The entry as a store gives it back, once it is committed."""
    return Record(
        address=entry.address,
        token=entry.token,
        state=State.DONE,
        attempt=entry.attempt,
        revision=2,
        lease_left=0.0,
        age=0.0,
        ttl_left=entry.ttl,
    )


def test_in_seen_mode_what_was_gone_is_not_written_until_it_is_written_anew() -> None:
    entry = Entry(address=ADDRESS, token=b"t" * 16, state=State.DONE, attempt=2, ttl=60.0)
    found = record_of(entry)
    hand = Hand(write_seen(delivery(Heard()), entry, found))
    assert (hand.step.entry, hand.step.replacing) == (entry, found)

    # The record that it was to replace has gone: nothing was written.
    step = hand.reply(GONE)

    assert (step.entry, step.replacing) == (entry, None)
    assert hand.reply(None) is None
    assert hand.value is True


def test_in_seen_mode_what_is_gone_again_and_again_was_not_remembered() -> None:
    entry = Entry(address=ADDRESS, token=b"t" * 16, state=State.DONE, attempt=2, ttl=60.0)
    hand = Hand(write_seen(delivery(Heard()), entry, record_of(entry)))

    while hand.step is not None:
        assert isinstance(hand.step, Claiming)
        hand.reply(GONE)

    assert hand.value is False


def test_the_answer_to_a_lost_commit_of_ones_own_is_the_run_itself_and_no_replay() -> None:
    heard = Heard()
    hand = Hand(transact(delivery(heard)))
    assert isinstance(hand.step, Beginning)
    first = hand.reply(None)
    assert isinstance(first, Claiming)
    assert isinstance(hand.reply(None), Running)
    assert isinstance(hand.reply(Ended(value="paid")), Finishing)
    assert isinstance(hand.reply(True), Committing)

    # Nobody knows what became of the COMMIT: it is delivered again, and finds what the first one has committed.
    step = hand.reply(Commit.UNKNOWN)
    while isinstance(step, (Pausing, Beginning)):
        step = hand.reply(None if isinstance(step, Beginning) else 0.0)
    assert isinstance(step, Claiming)
    assert step.entry.token != first.entry.token
    assert isinstance(hand.reply(record_of(first.entry)), Committing)
    assert hand.reply(Commit.DONE) is None

    assert (hand.value.value, hand.value.replayed) == ("paid", False)
    assert heard.kinds == ["started", "finished"]


@pytest.mark.parametrize("at", [Beginning, Claiming])
def test_a_lost_commit_that_nobody_can_be_asked_about_is_never_told_as_nothing(at: type[Any]) -> None:
    hand = Hand(transact(delivery(Heard())))
    answers: dict[type[Any], Any] = {
        Claiming: None,
        Running: Ended(value="paid"),
        Finishing: True,
        Committing: Commit.UNKNOWN,
    }
    while not isinstance(hand.step, Committing):
        hand.reply(answers.get(type(hand.step)))
    hand.reply(Commit.UNKNOWN)
    while not isinstance(hand.step, at):
        hand.reply(0.0 if isinstance(hand.step, Pausing) else None)

    away = StoreUnavailable("the server cannot be reached. Nothing ran")
    with pytest.raises(StoreUnavailable, match="it ran, the answer to its COMMIT was lost") as told:
        hand.fail_for_good(away)

    assert "Nothing ran" not in str(told.value)
    assert told.value.__cause__ is away


def test_a_store_that_is_away_before_any_commit_is_told_as_it_is() -> None:
    hand = Hand(transact(delivery(Heard())))
    away = StoreUnavailable("the server cannot be reached. Nothing ran")

    with pytest.raises(StoreUnavailable) as told:
        hand.fail(away)

    assert told.value is away


def given_up(hand: Hand) -> tuple[list[float], int]:
    """The pauses of a delivery whose every transaction meets a conflict, and how many transactions there were."""
    pauses, begun = [], 0
    try:
        while True:
            if isinstance(hand.step, Beginning):
                begun += 1
                hand.reply(None)
            elif isinstance(hand.step, Pausing):
                pauses.append(hand.step.seconds)
                hand.reply(hand.step.seconds)
            elif isinstance(hand.step, Committing):
                hand.reply(Commit.CONFLICT)
            else:
                hand.reply(Ended(value=None) if isinstance(hand.step, Running) else None)
    except StoreUnavailable:
        return pauses, begun


def test_a_transaction_that_met_a_conflict_is_tried_again_after_a_pause_that_grows_and_has_bounds() -> None:
    longest = msgspec.structs.replace(delivery(Heard()), mint=lambda: b"\xff" * 16)

    pauses, begun = given_up(Hand(transact(longest)))

    # None before the first, one before each other.
    assert (begun, len(pauses)) == (TRANSACTIONS_MAX, TRANSACTIONS_MAX - 1)
    assert [round(pause, 3) for pause in pauses[:3]] == [0.005, 0.01, 0.02]
    assert max(pauses) <= RETRY_PAUSE_MAX
    assert sum(pauses) < 13


def test_two_that_met_do_not_come_back_at_the_same_moment() -> None:
    here, there = (given_up(Hand(transact(delivery(Heard()))))[0] for _ in range(2))

    assert here != there
    assert all(pause < RETRY_PAUSE_MAX for pause in (*here, *there))


def test_an_end_is_insisted_on_for_one_lease_in_which_the_time_that_each_failure_took_counts() -> None:
    """Also while the heartbeat gets through, so that the lease goes on."""
    claim = Claim(ADDRESS, b"t" * 16, 30.0)
    ending = Finishing(claim, Ending(state=State.DONE, ttl=60.0))
    away, request = StoreUnavailable("the pool gave no connection"), 0
    hand = Hand(insist(Teller(Heard()), claim, ending, "finish"))

    while hand.step is ending:
        request += 1
        assert isinstance(hand.fail(away), Took)
        assert isinstance(hand.reply(10.0), LeaseLeft)
        if hand.reply(30.0) is not None:
            assert isinstance(hand.step, Pausing)
            hand.reply(0.0)

    assert (request, hand.value) == (3, away)


@pytest.mark.parametrize("advice", [". Is it large enough?", ""])
def test_of_a_step_that_has_run_nobody_says_that_nothing_ran(advice: str) -> None:
    entry = Entry(address=ADDRESS, token=b"t" * 16, lease=30.0, ttl=60.0)
    hand = Hand(take_step(StepLog(entry, MsgspecCodec(), Teller(Heard())), "charge", lambda: None, Any))
    hand.reply(Ended(value="charged"))
    hand.fail(StoreUnavailable(f"your pool gave no connection. Nothing ran{advice}"))
    hand.reply(30.0)

    with pytest.raises(OutcomeUnknown, match=rf"'charge' has run.*gave no connection{re.escape(advice)}") as told:
        hand.reply(0.0)

    assert "Nothing ran" not in str(told.value)
