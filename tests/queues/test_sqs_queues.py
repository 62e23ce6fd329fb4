"""SQS: visibility, redrive policies and FIFO groups, on a real server; and the rules for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from onefold import InProgress, OutcomeUnknown, StoreUnavailable, UsageError, current
from onefold.events import subscribe
from onefold.queues._shared.verdict import SOON, HandlerRaised, Later, Never
from onefold.queues._sqs import jobs as sqs_jobs
from onefold.queues._sqs import requests as sqs_requests
from onefold.queues._sqs.consumer import BEATS, OWN_REDRIVE, VISIBILITY_MAX, Delivery, Rules, Settings, Situation, Step
from onefold.queues._sqs.jobs import Change, Jobs
from tests.queues.sqs_tools import Environment, Handled, Mode, each_mode, mode, proxied, said, shortly, worker
from tests.support import PATIENCE, eventually

__all__ = ["each_mode", "mode", "shortly"]

# Short enough to wait for three times, and long enough for the extensions of a busy machine.
VISIBILITY = 2


@pytest.fixture
def extensions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages whose visibility was extended."""
    sent: list[str] = []
    extended = Jobs.extended

    def noted(self: Jobs, changes: list[Change], at: float) -> None:
        extended(self, changes, at)
        sent.extend(one.job.delivery.position for one in changes)

    monkeypatch.setattr(Jobs, "extended", noted)
    return sent


class TestVisibility:
    """A message that this worker has is not delivered to another one."""

    def test_a_handler_that_takes_three_times_the_visibility_is_not_delivered_again(
        self, mode: Mode, extensions: list[str], sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()
        handle.gate = threading.Event()

        with Environment(sqs_url, sqs_name, visibility=VISIBILITY) as environment:
            environment.send_keyed("pay-1")
            environment.send_keyed("pay-2")
            with worker(environment, "memory:", handle, mode=mode):
                # Of both: the second waits for its turn meanwhile.
                assert eventually(lambda: len(extensions) >= 2 * 3 * BEATS)
                assert len(set(extensions)) == 2
                assert len(handle.calls) == 1
                handle.gate.set()
                environment.settled()

        assert [one.receive_count for one in handle.calls] == [1, 1]

    def test_one_that_is_delivered_again_is_not_run_a_second_time_and_its_late_end_counts(
        self, mode: Mode, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        """As if the first worker were frozen, or cut off from SQS: nothing of it arrives until its handler ends."""
        store, slow, other = f"sqlite:///{tmp_path}/records.db", Handled(), Handled()
        slow.gate, change = threading.Event(), sqs_requests.change
        waits: list[str] = []

        def cut_off(client: Any, queue: str, changes: Any) -> Any:
            if slow.gate is not None and not slow.gate.is_set() and changes[0].job.delivery.receive_count == 1:
                raise EndpointConnectionError(endpoint_url="")
            waits.append("changed")
            return (yield from change(client, queue, changes))

        monkeypatch.setattr(sqs_requests, "change", cut_off)
        with Environment(sqs_url, sqs_name, visibility=1) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, store, slow, mode=mode):
                assert eventually(lambda: bool(slow.calls))
                with worker(environment, store, other, mode=mode, wait=0, lease=1):
                    assert eventually(lambda: bool(waits))
                    slow.gate.set()
                    environment.settled()
            assert environment.no_letters()

        assert (len(slow.calls), len(other.calls)) == (1, 0)

    def test_a_message_whose_claim_is_lost_is_not_kept_from_others(
        self, mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        ran: list[int] = []
        store, second = proxied(mode), threading.Event()

        def handle(delivery: Delivery) -> None:
            ran.append(delivery.receive_count)
            if len(ran) > 1:
                store.down = set()
                second.set()
                return
            store.down = {"extend"}
            assert eventually(lambda: current().lost)
            assert second.wait(PATIENCE)

        class Handle:
            def __call__(self, delivery: Delivery) -> None:
                handle(delivery)

            async def in_task(self, delivery: Delivery) -> None:
                await asyncio.to_thread(handle, delivery)

        with Environment(sqs_url, sqs_name, visibility=1) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, store, Handle(), mode=mode, threads=2, lease=0.5, wait=0):
                environment.settled()
            assert environment.no_letters()

        assert ran == [1, 2]

    def test_a_visibility_of_nothing_is_refused_and_one_of_the_workers_own_is_used(
        self, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()
        with Environment(sqs_url, sqs_name, visibility=0) as environment:
            environment.send_keyed("pay-1")
            with (
                pytest.raises(UsageError, match="every worker would get a message at once"),
                worker(environment, "memory:", handle),
            ):
                pytest.fail("it consumes")
            with worker(environment, "memory:", handle, visibility="30s"):
                environment.settled()

        assert len(handle.calls) == 1

    def test_settings_that_may_not_be_read_are_assumed_and_told(
        self, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        handle = Handled()

        def forbidden(*_: Any, **__: Any) -> Any:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetQueueAttributes")

        with Environment(sqs_url, sqs_name) as environment:
            environment.send_keyed("pay-1", times=2)
            with worker(environment, "memory:", handle, prepare=lambda client: _replace(client, forbidden)):
                environment.settled()

        assert len(handle.calls) == 1
        (told,) = [line for line in caplog.messages if "cannot be read" in line]
        assert "no redrive policy is assumed, and each receive asks for a visibility of 30 s" in told


def _replace(client: Any, forbidden: Callable[..., Any]) -> None:
    client.get_queue_attributes = forbidden


class Turns(threading.Semaphore):
    """A gate that lets some calls pass."""

    def wait(self, seconds: float) -> bool:
        return self.acquire(timeout=seconds)


class TestRedrive:
    """SQS counts each receive, and buries what has used them up: what only waits must not be among them."""

    def test_the_last_receive_that_fails_is_a_dead_letter_with_its_reason(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled(failures=99)

        with Environment(sqs_url, sqs_name, max_receives=2) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, "memory:", handle, mode=mode):
                reason = said(environment.letter(), "x-onefold-reason") or ""
                environment.settled()

        assert reason.startswith("its attempt 2 of 2 receives failed with ValueError")
        assert len(handle.calls) == 2

    def test_what_waits_for_the_store_uses_up_no_receive(
        self, each_mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle, store = Handled(), proxied(each_mode)
        store.down = {"claim"}

        with Environment(sqs_url, sqs_name, max_receives=1) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, store, handle, mode=each_mode):
                assert eventually(lambda: store.calls["claim"] >= 3)
                store.down = set()
                environment.settled()
            assert environment.no_letters()

        assert [one.receive_count for one in handle.calls] == [1]

    def test_a_duplicate_of_a_running_message_on_its_last_receive_is_no_dead_letter(
        self, mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()
        handle.gate = threading.Event()

        with Environment(sqs_url, sqs_name, max_receives=1) as environment:
            environment.send_keyed("pay-1", times=2)
            with worker(environment, "memory:", handle, mode=mode, threads=2, wait=0, lease=1) as one:
                assert eventually(lambda: len(one.worker._work._waiting) == 1)
                handle.gate.set()
                environment.settled()
            assert environment.no_letters()

        assert len(handle.calls) == 1

    @pytest.mark.parametrize("fifo", [False, True])
    def test_messages_that_wait_in_place_do_not_keep_a_worker_from_the_others(
        self, each_mode: Mode, fifo: bool, sqs_url: str, sqs_name: str
    ) -> None:
        """As many as it has at a time are held, each for a person."""
        handle = Handled(failures=10, error=OutcomeUnknown)

        with Environment(sqs_url, sqs_name, fifo=fifo, max_receives=5) as environment:
            for number in range(10):
                environment.send_keyed(f"held-{number}", group=f"g{number}" if fifo else None)
            with worker(environment, "memory:", handle, mode=each_mode, after_crash="hold") as one:
                assert eventually(lambda: len(one.worker._work._waiting) == 10)
                environment.send_keyed("pay-1", group="others" if fifo else None)
                assert eventually(lambda: len(handle.calls) == 11)
                assert len(one.worker._work._waiting) == 10
            assert environment.no_letters()

    def test_the_queues_own_redrive_policy_takes_what_never_can_run_and_what_fails(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle, heard = Handled(failures=99), list[str]()
        end = _subscribed(heard)

        with Environment(sqs_url, sqs_name, max_receives=2) as environment:
            environment.send("poison")
            environment.send_keyed("pay-1", "fails")
            with worker(environment, "memory:", handle, mode=mode, dead_letter=OWN_REDRIVE):
                letters = environment.letters(2)
                environment.settled()
        end()

        assert sorted(one["Body"] for one in letters) == ["fails", "poison"]
        assert all("x-onefold-reason" not in one.get("MessageAttributes", {}) for one in letters)
        assert [one.receive_count for one in handle.calls] == [1, 2]
        assert heard.count("buried") == 2

    def test_a_queue_without_a_redrive_policy_of_its_own_is_refused(self, sqs_url: str, sqs_name: str) -> None:
        with (
            Environment(sqs_url, sqs_name) as environment,
            pytest.raises(UsageError, match="has no redrive policy"),
            worker(environment, "memory:", Handled(), dead_letter=OWN_REDRIVE),
        ):
            pytest.fail("it consumes")

    def test_a_worker_that_leaves_buries_or_runs_what_sqs_would_not_deliver_again(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle, store = Handled(), proxied(mode)
        store.down = {"claim"}

        with Environment(sqs_url, sqs_name, max_receives=1) as environment:
            environment.send_keyed("pay-1")
            with worker(environment, store, handle, mode=mode):
                assert eventually(lambda: bool(store.calls["claim"]))
            reason = said(environment.letter(), "x-onefold-reason") or ""
            assert reason.startswith("it was the last of 1 receives, and waited: StoreUnavailable")

            store.down, handle.gate = set(), threading.Event()
            for number in range(3):
                environment.send_keyed(f"pay-{number}")
            with worker(environment, store, handle, mode=mode) as one:
                assert eventually(lambda: len(one.worker._work) == 3)
                one.hint()
                assert eventually(lambda: one.worker._work.is_leaving)
                handle.gate.set()
            environment.settled()

        assert len(handle.calls) == 3

    def test_each_request_asks_for_many_messages(
        self, each_mode: Mode, sqs_url: str, sqs_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handle, asked, receive = Handled(), list[int](), sqs_requests.receive

        def counted(client: Any, queue: str, count: int, settings: Settings) -> Any:
            asked.append(count)
            return receive(client, queue, count, settings)

        monkeypatch.setattr(sqs_requests, "receive", counted)
        with Environment(sqs_url, sqs_name) as environment:
            for number in range(30):
                environment.send_keyed(f"pay-{number}")
            turns = Turns(7)
            handle.gate = turns  # type: ignore[assignment]
            with worker(environment, "memory:", handle, mode=each_mode):
                assert eventually(lambda: len(handle.calls) == 8)
                # It runs, and two wait for it: nothing is asked for yet.
                assert eventually(lambda: environment.counts() == (20, 3))
                turns.release(30)
                assert eventually(lambda: len(handle.calls) == 30)

        # One may run meanwhile.
        assert {*asked} <= {9, 10}

    def test_a_worker_that_leaves_gives_back_what_it_has_not_started(
        self, each_mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()
        handle.gate = threading.Event()

        with Environment(sqs_url, sqs_name) as environment:
            for number in range(5):
                environment.send_keyed(f"pay-{number}")
            with worker(environment, "memory:", handle, mode=each_mode) as one:
                assert eventually(lambda: len(one.worker._work) == 5 and bool(handle.calls))
                one.hint()
                # Others get them, while the first is still running.
                assert eventually(lambda: environment.counts() == (4, 1))
                handle.gate.set()
            assert environment.counts() == (4, 0)

        assert len(handle.calls) == 1


def _subscribed(heard: list[str]) -> Callable[[], None]:
    return subscribe(lambda event: heard.append(event.kind.value))


class TestFifo:
    """Within a group, no message overtakes another one."""

    @pytest.mark.parametrize(
        ("max_receives", "dead_letter", "receives"),
        [(0, None, [1, 2]), (5, None, [1, 1]), (5, OWN_REDRIVE, [1, 2])],
        ids=["unlimited", "limited", "own redrive"],
    )
    def test_a_message_that_failed_is_not_overtaken_in_its_group(
        self, mode: Mode, max_receives: int, dead_letter: Any, receives: Any, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        ran: list[tuple[str, int]] = []

        def handle(delivery: Delivery) -> None:
            ran.append((delivery.body.decode(), delivery.receive_count))
            if [body for body, _ in ran].count("a1") == 1 and delivery.body == b"a1":
                raise ValueError

        with Environment(sqs_url, sqs_name, fifo=True, max_receives=max_receives) as environment:
            for body in ("a1", "b1", "a2", "a3", "b2"):
                environment.send_keyed(body, body, group=body[0])
            options = {"dead_letter": dead_letter} if dead_letter else {}
            with worker(environment, "memory:", handle, mode=mode, threads=3, **options):
                environment.settled()
            assert environment.no_letters()

        assert [body for body, _ in ran if body[0] == "a"] == ["a1", "a1", "a2", "a3"]
        assert [body for body, _ in ran if body[0] == "b"] == ["b1", "b2"]
        # Where a receive is worth something, those behind it are not given back.
        assert [count for body, count in ran if body == "a1"] == receives
        assert [count for body, count in ran if body == "a3"] == receives[-1:]

    @pytest.mark.parametrize("max_receives", [9, pytest.param(0, marks=pytest.mark.more)])
    def test_a_message_that_has_to_wait_is_not_overtaken_in_its_group(
        self, mode: Mode, max_receives: int, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle, store = Handled(), proxied(mode)
        store.down = {"claim"}

        with Environment(sqs_url, sqs_name, fifo=True, max_receives=max_receives) as environment:
            for body in ("1", "2", "3"):
                environment.send_keyed(body, body, group="a")
            with worker(environment, store, handle, mode=mode, threads=3):
                assert eventually(lambda: store.calls["claim"] >= 2)
                store.down = set()
                environment.settled()

        assert handle.bodies == ["1", "2", "3"]

    def test_a_dead_letter_makes_way_for_its_group_and_keeps_where_it_belongs(
        self, mode: Mode, shortly: None, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()

        with Environment(sqs_url, sqs_name, fifo=True, max_receives=3) as environment:
            environment.send("poison", group="a")
            environment.send_keyed("2", "2", group="a")
            with worker(environment, "memory:", handle, mode=mode):
                letter = environment.letter()
                environment.settled()

        assert handle.bodies == ["2"]
        assert letter["Attributes"]["MessageGroupId"] == said(letter, "x-onefold-group") == "a"
        assert said(letter, "x-onefold-deduplication-id")

    def test_groups_run_beside_each_other_and_one_group_one_by_one(
        self, mode: Mode, sqs_url: str, sqs_name: str
    ) -> None:
        handle = Handled()
        handle.gate = threading.Event()

        with Environment(sqs_url, sqs_name, fifo=True) as environment:
            for body in ("a1", "a2", "b1", "b2"):
                environment.send_keyed(body, body, group=body[0])
            with worker(environment, "memory:", handle, mode=mode, threads=4) as one:
                assert eventually(lambda: len(one.worker._work) == 4 and len(handle.calls) == 2)
                handle.gate.set()
                environment.settled()

        assert sorted(handle.bodies[:2]) == ["a1", "b1"]
        assert sorted(handle.bodies[2:]) == ["a2", "b2"]


def delivered(count: int = 1, group: str | None = None, position: str = "m") -> Delivery:
    return Delivery(b"{}", {}, None, group, "charges", count, position, {}, None)


class TestRules:
    def after(self, verdict: Any, count: int, settings: Settings, dead_letter: Any = "https://dead", **at: Any) -> Step:
        rules = Rules("charge", dead_letter, unacked_max=900.0)
        return rules.after(verdict, delivered(count), settings, Situation(**at))

    @pytest.mark.parametrize(("count", "delay"), [(1, 1), (2, 2), (4, 8), (7, 60), (999, 60)])
    def test_a_store_that_is_down_is_asked_less_and_less_often(self, count: int, delay: float) -> None:
        down = Later(1.0, "the store is down", error=StoreUnavailable("down"))

        assert self.after(down, count, Settings())[:2] == ("give back", delay)

    @pytest.mark.parametrize(("age", "delay"), [(0.0, 1), (3.0, 3), (30.0, 30), (600.0, 60)])
    def test_and_so_it_is_in_place(self, age: float, delay: float) -> None:
        down = Later(1.0, "the store is down", error=StoreUnavailable("down"))

        assert self.after(down, 1, Settings(max_receives=2), age=age)[:2] == ("again", delay)

    def test_a_running_duplicate_comes_when_the_lease_of_the_other_is_over(self) -> None:
        running = Later(17.0, "another worker runs it", error=InProgress("running"))

        assert self.after(running, 9, Settings())[:2] == ("give back", 17.0)

    def test_no_delay_is_longer_than_sqs_allows(self) -> None:
        running = Later(1e6, "another worker runs it", error=InProgress("running"))

        assert self.after(running, 1, Settings(), age=3600.0).delay == VISIBILITY_MAX - 3600

    def test_what_has_waited_long_in_place_is_given_back_but_on_its_last_receive(self) -> None:
        running, limited = Later(17.0, "another worker runs it"), Settings(max_receives=2)

        assert self.after(running, 1, limited, age=890.0)[:2] == ("give back", SOON)
        assert self.after(running, 2, limited, age=890.0)[:2] == ("again", 17.0)
        # Even there it ends: SQS keeps it no longer.
        assert self.after(running, 2, limited, age=VISIBILITY_MAX - 10)[:2] == ("give back", SOON)
        held = Later(60.0, "held", limited=True)
        assert self.after(held, 2, limited, age=890.0)[:3] == ("bury", 0.0, "held")

    def test_failures_are_counted_by_sqs_if_it_counts_and_in_place_only_for_those_behind(self) -> None:
        failed, limited = HandlerRaised(ValueError()), Settings(max_receives=4, is_fifo=True)

        assert self.after(failed, 3, limited)[:2] == ("give back", 4.0)
        assert self.after(failed, 1, limited, is_followed=True, retries=1)[:2] == ("again", 2.0)
        assert self.after(failed, 1, limited, is_followed=True, retries=3).action == "bury"
        assert self.after(failed, 4, limited, OWN_REDRIVE).action == "leave"
        assert self.after(failed, 3, limited, OWN_REDRIVE, is_followed=True)[:2] == ("give back", 4.0)

    def test_what_never_can_run_is_left_to_the_redrive_policy_without_a_hot_loop(self) -> None:
        never, limited = Never("it has no key"), Settings(max_receives=3)

        steps = [self.after(never, count, limited, OWN_REDRIVE)[:2] for count in (1, 2, 3, 4, 9)]

        assert steps[:3] == [("give back", 1.0), ("give back", 2.0), ("leave", 0.0)]
        # SQS did not move it: there is no such queue any more.
        assert steps[3:] == [("give back", 8.0), ("give back", 60.0)]
        assert self.after(HandlerRaised(ValueError()), 4, limited, OWN_REDRIVE)[:2] == ("give back", 8.0)


class TestJobs:
    """What SQS is told, and when; the time is passed."""

    def jobs(self, count: int, settings: Settings, groups: str = "") -> tuple[Jobs, list[Any]]:
        jobs = Jobs(settings, Rules("charge", "https://dead"))
        names = groups or " " * count
        jobs.take(((delivered(1, names[at].strip() or None, f"m{at}"), f"r{at}") for at in range(count)), 0.0)
        return jobs, [one for one in (jobs.next(0.0) for _ in range(count)) if one is not None]

    def test_deletions_are_sent_together_and_those_that_failed_once_more(self) -> None:
        jobs, taken = self.jobs(12, Settings())
        for job in taken[:9]:
            jobs.ended(job, Step("ack"), 1.0)
        assert (jobs.due(1.0).deletions, jobs.next_due()) == ([], 1.0 + sqs_jobs.DELETE_SECONDS)

        jobs.ended(taken[9], Step("ack"), 1.0)
        deletions = jobs.due(1.0).deletions
        assert deletions == taken[:10]
        jobs.deleted(deletions, [taken[3]], 1.0)

        assert len(jobs) == 3
        assert jobs.due(1.5).deletions == []
        for attempt in range(1, sqs_jobs.DELETE_TRIES):
            assert jobs.due(1.0 + attempt * sqs_jobs.RETRY_SECONDS).deletions == [taken[3]]
            jobs.deleted([taken[3]], [taken[3]], 1.0 + attempt * sqs_jobs.RETRY_SECONDS)
        assert len(jobs) == 2

    def test_what_is_done_takes_up_no_room_while_its_deletion_is_under_way(self) -> None:
        jobs, taken = self.jobs(3, Settings())
        for job in taken[:2]:
            jobs.ended(job, Step("ack"), 1.0)
        assert (jobs.busy, len(jobs)) == (1, 3)

        deletions = jobs.due(2.0).deletions
        assert (deletions, jobs.busy) == (taken[:2], 1)
        jobs.leave()
        # It was neither unstarted nor left.
        assert jobs.due(2.0).given_back == []
        jobs.deleted(deletions, [], 2.0)

        assert (jobs.busy, len(jobs)) == (1, 1)

    def test_a_message_is_extended_before_a_third_of_its_visibility_has_passed_and_not_beyond_twelve_hours(
        self,
    ) -> None:
        jobs, (job,) = self.jobs(1, Settings(visibility=30.0))

        assert (jobs.due(9.9).extended, jobs.next_due()) == ([], 10.0)
        assert jobs.due(10.0).extended == [(job, 30.0)]
        jobs.extended([Change(job, 30.0)], 10.0)
        assert (jobs.due(19.0).extended, job.visible_at) == ([], 40.0)
        # Not later than SQS allows, and then not any more.
        job.extend_at = 0.0
        assert jobs.due(VISIBILITY_MAX - 20).extended == [(job, 20.0)]
        assert jobs.due(VISIBILITY_MAX).extended == []
        assert jobs.next_due() > VISIBILITY_MAX

    def test_what_was_not_extended_in_time_is_not_begun_nor_is_what_waits_behind_it(self) -> None:
        jobs = Jobs(Settings(visibility=30.0, is_fifo=True), Rules("charge", "https://dead"))
        jobs.take(((delivered(1, "a", f"m{at}"), f"r{at}") for at in range(2)), 0.0)
        head, behind = [*jobs._unsettled]
        jobs.extended([Change(behind, 30.0)], 29.0)

        assert jobs.next(31.0) is None
        assert jobs.due(31.0).given_back == [(behind, 0.0)]
        assert len(jobs) == 0
        assert head.is_running is False

    def test_those_behind_a_lost_head_are_not_kept_either(self) -> None:
        """SQS delivers no message of a group while another of it is in flight."""
        jobs = Jobs(Settings(visibility=30.0, is_fifo=True), Rules("charge", "https://dead"))
        jobs.take(((delivered(1, "a", f"m{at}"), f"r{at}") for at in range(2)), 0.0)
        head = jobs.next(0.0)
        assert head is not None
        jobs.not_extended([Change(head, 30.0)], 12.0, for_good=True)

        assert jobs.due(13.0).extended == []

    def test_what_comes_again_while_its_lost_head_runs_begins_its_group_anew(self) -> None:
        """Behind that head it would not be extended, and use up its receives without a turn."""
        jobs = Jobs(Settings(visibility=30.0, max_receives=3, is_fifo=True), Rules("charge", "https://dead"))
        jobs.take(((delivered(1, "a", f"m{at}"), f"r{at}") for at in range(2)), 0.0)
        head = jobs.next(0.0)
        assert head is not None
        jobs.not_extended([Change(head, 30.0)], 12.0, for_good=True)

        jobs.take(((delivered(2, "a", f"m{at}"), f"s{at}") for at in range(2)), 31.0)
        again = jobs.next(31.0)

        assert again is not None
        assert again.receipt == "s0"
        # Those behind it are kept with it, in their order.
        assert [change.job.receipt for change in jobs.due(41.0).extended] == ["s0", "s1"]
        assert jobs.next(41.0) is None
        # The end of the lost one is not theirs.
        jobs.ended(head, Step("give back", 1.0), 42.0)
        assert [change.job.receipt for change in jobs.due(42.0).given_back] == ["r0"]
        jobs.ended(again, Step("ack"), 43.0)
        behind = jobs.next(43.0)
        assert behind is not None
        assert behind.receipt == "s1"

    def test_what_waits_for_itself_takes_up_no_room_but_not_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jobs, (first, other) = self.jobs(4, Settings(is_fifo=True, max_receives=3), "aaab")
        assert jobs.busy == 4
        # Those behind it wait with it.
        jobs.ended(first, Step("again", 5.0, is_aside=True), 1.0)
        assert jobs.busy == 1
        # Whoever waits for the store waits for what all need.
        jobs.ended(other, Step("again", 5.0), 1.0)
        assert jobs.busy == 1
        monkeypatch.setattr(sqs_jobs, "WAITING_MAX", 3)
        assert jobs.busy == len(jobs) == 4

    def test_a_group_goes_on_after_its_head(self) -> None:
        jobs, (first, other) = self.jobs(3, Settings(is_fifo=True), "aab")

        assert [first.delivery.position, other.delivery.position] == ["m0", "m2"]
        jobs.ended(first, Step("ack"), 1.0)
        second = jobs.next(1.0)

        assert second is not None
        assert second.delivery.position == "m1"
