"""The ledger of partitions, step by step: what waits, what goes on, and what is never committed. No broker is asked."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from onefold import Held, InProgress, StoreUnavailable, UsageError
from onefold.queues._kafka import partitions as kafka_partitions
from onefold.queues._kafka.consumer import GuardedConsumer
from onefold.queues._kafka.messages import letter_headers, message_of
from onefold.queues._kafka.offsets import Delivery, Partition
from onefold.queues._kafka.partitions import Assigned, Bury, Commit, FindEnds, GoBack, Ledger, Position, Resume
from onefold.queues._kafka.unread import LOOK_EVERY, UNREAD_AFTER, Ends
from onefold.queues._shared.verdict import ACK, HandlerRaised, Later, Never, Verdict
from onefold.queues.keys import Message
from tests.support import Clock

P0, P1 = Partition("payments", 0), Partition("payments", 1)


class Shell:
    """Performs steps by noting them; the answers are given beforehand, and True otherwise."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.ledger = Ledger(options, stops=False, clock=self.clock)  # type: ignore[arg-type]
        self.answers: dict[type, Any] = {}

    def perform(self, steps: Any) -> tuple[list[Any], Any]:
        done: list[Any] = []
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return done, end.value
            done.append(step)
            answer = self.answers.get(type(step), True)

    def delivery(self, offset: int, partition: Partition = P0) -> Delivery:
        return Delivery(self.ledger.spot(*partition, offset), Message(b"", {}), None)

    def settle(self, *endings: tuple[int, Verdict]) -> list[Any]:
        deliveries = [self.delivery(offset) for offset, _ in endings]
        return self.perform(self.ledger.settle(deliveries, [verdict for _, verdict in endings]))[0]

    def admits(self, offset: int) -> bool:
        return bool(self.perform(self.ledger.admit(self.delivery(offset).spot))[1])

    def wake(self) -> list[Any]:
        return self.perform(self.ledger.wake())[0]


LATER = Later(10.0, "running elsewhere")
FAILED = HandlerRaised(ValueError("no"))


def test_what_is_finished_is_committed_up_to_the_first_that_is_not() -> None:
    shell = Shell()

    steps = shell.settle((5, ACK), (6, ACK), (7, LATER), (8, ACK), (9, Never("no key")))

    # What is above the unfinished one is neither committed nor buried: it comes again.
    assert steps == [Commit({P0: 7}), GoBack(P0, 7)]


def test_a_partition_that_waits_goes_on_when_its_time_has_come_and_not_before() -> None:
    shell = Shell()
    shell.settle((7, LATER))
    shell.clock.advance(9.9)
    assert shell.wake() == []
    assert shell.ledger.next_due() == pytest.approx(0.1)
    assert not shell.admits(7)

    shell.clock.advance(0.2)
    assert shell.wake() == [Resume(P0)]
    assert shell.wake() == []
    assert shell.admits(7)
    assert shell.settle((7, ACK)) == [Commit({P0: 8})]
    assert shell.ledger.next_due() is None


def test_a_partition_that_could_not_go_back_is_told_again() -> None:
    shell = Shell()
    shell.answers[GoBack] = False
    assert shell.settle((7, LATER)) == [GoBack(P0, 7)]
    shell.answers[Position] = 10_000
    assert not shell.admits(8)

    shell.answers[GoBack] = True
    assert shell.wake() == [GoBack(P0, 7)]


def test_messages_read_before_the_partition_went_back_are_left_alone() -> None:
    shell = Shell()
    shell.settle((7, Later(0.0, "soon")))
    shell.answers[Position] = -1001

    assert not shell.admits(8)
    assert shell.admits(7)
    assert shell.admits(8)


def test_an_offset_that_is_gone_does_not_keep_its_partition_for_ever() -> None:
    shell = Shell()
    shell.settle((7, Later(0.0, "soon")))
    shell.answers[Position] = 21

    assert shell.admits(20)
    assert shell.settle((20, ACK)) == [Commit({P0: 21})]


@pytest.mark.parametrize("raised", [None, RuntimeError("closed")], ids=["interrupted", "an error"])
@pytest.mark.parametrize("at", [Bury, Commit])
def test_what_was_not_finished_when_it_was_interrupted_comes_again(at: type, raised: Exception | None) -> None:
    shell = Shell()
    endings: list[tuple[int, Verdict]] = [(5, ACK), (6, Never("no key")), (7, FAILED), (8, ACK)]
    steps = shell.ledger.settle([shell.delivery(offset) for offset, _ in endings], [verdict for _, verdict in endings])
    step = steps.send(None)
    while not isinstance(step, at):
        step = steps.send(True)

    if raised is None:
        steps.close()
    else:
        with pytest.raises(type(raised)):
            steps.throw(raised)

    first = 6 if at is Bury else 7
    assert GoBack(P0, first) in shell.wake()
    shell.answers[Position] = -1001
    assert not shell.admits(9)


def test_other_partitions_go_back_too_when_one_is_interrupted() -> None:
    shell = Shell()
    deliveries = [shell.delivery(5), shell.delivery(6), shell.delivery(3, P1)]
    steps = shell.ledger.settle(deliveries, [ACK, Never("no key"), ACK])
    assert isinstance(steps.send(None), Bury)

    steps.close()

    assert {GoBack(P0, 6), GoBack(P1, 3)} <= set(shell.wake())


@pytest.mark.parametrize("at", [Assigned, Position])
def test_what_was_read_when_it_was_interrupted_comes_again(at: type) -> None:
    shell = Shell()
    shell.settle((7, LATER))
    shell.clock.advance(UNREAD_AFTER + LOOK_EVERY)
    shell.answers |= {Assigned: {P0, P1}, FindEnds: Ends(5, 9), Position: 9}
    consumer = SimpleNamespace(_ledger=shell.ledger, _warn_of_silence=lambda: None)
    steps = GuardedConsumer._admit(consumer, [shell.delivery(8)])  # type: ignore[arg-type]
    step = steps.send(None)
    while not isinstance(step, at):
        step = steps.send(shell.answers.get(type(step), True))

    steps.close()

    shell.answers[Position] = -1001
    assert GoBack(P0, 7) in shell.wake()
    assert not shell.admits(9)


def test_a_failure_waits_longer_each_time_and_is_buried_in_the_end() -> None:
    shell = Shell(attempts=9, backoff=10.0)
    waits = []
    for _ in range(8):
        shell.settle((7, FAILED))
        waits.append(shell.ledger.next_due())
        shell.clock.advance(100.0)
        shell.wake()
        assert shell.admits(7)

    bury, commit = shell.settle((7, FAILED))

    assert waits == [10.0, 20.0, 40.0, *[kafka_partitions.BACKOFF_MAX] * 5]
    assert isinstance(bury, Bury)
    assert bury.reason == "it failed 9 times, the last time with ValueError"
    assert commit == Commit({P0: 8})


def test_waiting_for_another_worker_is_no_failed_attempt() -> None:
    shell = Shell(attempts=2)
    for _ in range(20):
        assert shell.settle((7, LATER)) == [GoBack(P0, 7)]
        shell.clock.advance(11.0)
        shell.wake()
        assert shell.admits(7)


def test_a_dead_letter_that_was_not_confirmed_commits_nothing() -> None:
    shell = Shell()
    shell.answers[Bury] = False

    steps = shell.settle((7, Never("no key")), (8, ACK))

    assert [type(step) for step in steps] == [Bury, GoBack]


def test_a_long_reason_is_cut() -> None:
    shell = Shell(attempts=1)

    bury, _ = shell.settle((7, Never("x" * 100_000)))

    assert len(bury.reason) == kafka_partitions.REASON_MAX


def test_a_partition_that_went_away_and_came_back_owes_nothing() -> None:
    shell = Shell(attempts=2)
    shell.settle((7, FAILED))
    stale = shell.delivery(7)
    shell.ledger.forget([P0])

    # It does not go back to where it was; that it was paused is another's affair, too.
    assert shell.wake() == [Resume(P0)]
    assert shell.perform(shell.ledger.settle([stale], [ACK]))[0] == []
    # Its failures were counted by whoever had it.
    assert shell.settle((7, FAILED)) == [GoBack(P0, 7)]


def test_a_partition_that_goes_while_a_dead_letter_is_confirmed_is_left_alone() -> None:
    shell = Shell()
    steps = shell.ledger.settle([shell.delivery(7), shell.delivery(3, P1)], [Never("no key"), ACK])

    assert isinstance(next(steps), Bury)
    shell.ledger.forget([P0])

    assert steps.send(True) == Commit({P1: 4})


def test_a_worker_s_own_mistake_is_raised_and_commits_what_is_below_it() -> None:
    shell, closed = Shell(), UsageError("this guard is closed")
    deliveries = [shell.delivery(offset) for offset in (5, 6, 7)]
    steps = shell.ledger.settle(deliveries, [ACK, Later(60.0, "closed", error=closed), Never("no key")])

    done = [next(steps), steps.send(None)]
    with pytest.raises(UsageError, match="this guard is closed"):
        steps.send(True)

    # Nothing is buried, and the offset stays where it is.
    assert done == [Commit({P0: 6}), GoBack(P0, 6)]


def test_a_store_that_is_away_is_told_at_once_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    shell, away = Shell(), StoreUnavailable("redis://cache:6379: the password is wrong")
    later = Later(1.0, "StoreUnavailable: redis://cache:6379: the password is wrong", error=away)
    told = []

    for _ in range(125):
        shell.settle((7, later))
        told.append(caplog.text.count("the password is wrong"))
        shell.clock.advance(1.0)
        shell.wake()
        assert shell.admits(7)

    assert (told[0], told[59], told[60], told[-1]) == (1, 1, 2, 3)


def test_that_another_worker_runs_it_is_no_warning_and_what_is_held_is_one(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    shell.settle((7, Later(1.0, "InProgress: running", error=InProgress())))
    assert caplog.text == ""

    for _ in range(3):
        shell.clock.advance(61.0)
        shell.wake()
        assert shell.admits(7)
        shell.settle((7, Later(60.0, "Held: somebody has to look", limited=True, error=Held())))

    assert caplog.text.count("Held") == 1


def test_the_last_header_of_a_name_counts() -> None:
    spot = Ledger({}, stops=False).spot("payments", 0, 7)

    message = message_of(None, [("k", b"1"), ("k", b"2")], spot)

    assert (message.headers, message.body, message.position) == ({"k": b"2"}, b"", "payments/0/7")


def test_a_letter_that_is_buried_twice_names_its_last_place_only() -> None:
    spot = Ledger({}, stops=False).spot("payments", 0, 7)

    headers = letter_headers([("k", b"1"), ("x-onefold-reason", b"old")], spot, "credit", "new")

    assert [name for name, _ in headers].count("x-onefold-reason") == 1


@pytest.mark.parametrize(("module", "package"), [("confluent_kafka", "confluent-kafka"), ("aiokafka", "aiokafka")])
def test_a_client_that_is_not_installed_is_told_in_words(module: str, package: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; import onefold.queues.{module}"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert f"{package} is not installed: pip install 'onefold[kafka]'" in done.stderr


def test_a_partition_that_went_while_it_was_paused_is_resumed_when_it_is_ours_again() -> None:
    shell = Shell()
    shell.settle((5, LATER))
    shell.ledger.forget([P0])
    shell.answers[Resume] = False
    assert shell.wake() == [Resume(P0)]
    # Not ours: it is looked at now and then, and not with each message.
    assert shell.wake() == []
    shell.clock.advance(kafka_partitions.STRAY_EVERY)
    assert shell.wake() == [Resume(P0)]

    # Whoever says that it came back has it resumed at once, and once.
    shell.ledger.assigned([P0])
    shell.answers[Resume] = True
    assert shell.wake() == [Resume(P0)]
    shell.clock.advance(100)
    assert shell.wake() == []


def test_what_the_user_has_paused_meanwhile_is_not_resumed_when_its_time_has_come() -> None:
    shell = Shell()
    shell.settle((7, LATER))
    shell.ledger.paused_by_user([P0])
    shell.clock.advance(11.0)

    assert shell.wake() == []
    # There is nothing to wake for.
    assert shell.ledger.next_due() is None

    assert shell.ledger.resumed_by_user([P0]) == {P0}
    assert shell.admits(7)


def test_what_the_user_has_paused_before_stays_paused_too() -> None:
    shell = Shell()
    shell.ledger.paused_by_user([P0, P1])
    assert shell.settle((7, LATER)) == [GoBack(P0, 7)]
    shell.clock.advance(11.0)

    assert shell.wake() == []


def test_what_the_user_resumes_too_early_waits_for_its_time() -> None:
    shell = Shell()
    shell.settle((7, LATER))
    shell.ledger.paused_by_user([P0, P1])

    assert shell.ledger.resumed_by_user([P0, P1]) == {P1}
    assert shell.wake() == []
    shell.clock.advance(11.0)
    assert shell.wake() == [Resume(P0)]


def test_what_the_user_has_paused_stays_paused_when_its_partition_comes_back() -> None:
    shell = Shell()
    shell.settle((7, LATER))
    shell.ledger.paused_by_user([P0])
    shell.ledger.assigned([P0])

    assert shell.wake() == []
    assert shell.ledger.resumed_by_user([P0]) == {P0}


def test_a_partition_of_ours_that_is_not_read_is_told_but_not_one_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    shell.answers |= {Assigned: {P0, P1}, FindEnds: Ends(5, 8)}
    shell.settle((5, Later(1_000.0, "running elsewhere")))
    shell.perform(shell.ledger.look())
    shell.clock.advance(UNREAD_AFTER + LOOK_EVERY)
    shell.perform(shell.ledger.look())
    shell.clock.advance(UNREAD_AFTER)

    steps, _ = shell.perform(shell.ledger.look())

    assert steps == [Assigned(), FindEnds(P1)]
    assert [line.message[:65] for line in caplog.records if line.levelname == "WARNING"] == [
        "payments/1 is assigned to this consumer, has 3 messages, and none"
    ]
