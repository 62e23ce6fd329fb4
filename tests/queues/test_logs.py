"""What is said of messages that wait or are buried: found by queue, operation and digest; never a key or a body."""

from __future__ import annotations

import logging

import pytest

from onefold import Event, Guard, Held, InProgress, StoreUnavailable, UsageError, subscribe
from onefold.events import Kind
from onefold.queues._shared.logs import CAUSES_MAX, SELDOM, Waits, address_of, buried, found_at, waits_of
from onefold.queues._shared.verdict import Later, of_error
from onefold.stores.base import Address

ADDRESS = Address("", "charge", "secret-key")
WHERE = f"charges: charge [key {ADDRESS.digest}]"

log = logging.getLogger("onefold.queues.test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock, caplog: pytest.LogCaptureFixture) -> Waits:
    caplog.set_level("DEBUG")
    return Waits(clock)


def later(error: Exception) -> Later:
    verdict = of_error(error, begun=False)
    assert isinstance(verdict, Later)
    return verdict


def down(message: str = "redis://cache: WRONGPASS: the server refuses this login") -> Later:
    error = StoreUnavailable(message)
    error.__cause__ = ConnectionError("what the driver says")
    return later(error)


def told(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def test_a_store_that_is_away_is_told_at_once_and_then_once_a_minute_with_a_count(
    waits: Waits, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for clock.now in (0.0, 1.0, 2.0, SELDOM, SELDOM + 1):
        waits.tell(log, WHERE, down())

    line = f"{WHERE}: again in 1 s: StoreUnavailable: redis://cache: WRONGPASS: the server refuses this login"
    assert told(caplog, "WARNING") == [line, f"{line} (2 more since this was last logged)"]
    assert "what the driver says" in caplog.text
    assert "what the driver says" not in "".join(told(caplog, "WARNING"))


def test_another_cause_is_told_at_once_and_one_that_differs_in_a_number_is_the_same(
    waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    for message in ("no answer in 2.01 s", "no answer in 2.02 s", "the disk is full"):
        waits.tell(log, WHERE, down(message))

    assert len(told(caplog, "WARNING")) == 2


def test_a_worker_that_cannot_work_is_an_error_with_its_text(waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        waits.tell(log, WHERE, later(UsageError("this guard is closed")))

    assert told(caplog, "ERROR") == [f"{WHERE}: again in 60 s: UsageError: this guard is closed"]


def test_a_running_duplicate_is_daily_business_and_what_is_held_is_a_warning_once(
    waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        waits.tell(log, WHERE, later(InProgress.about(ADDRESS, retry_after=1.0)))
        waits.tell(log, WHERE, later(Held.about(ADDRESS, remark="lost answer")))

    assert [": Held: " in line for line in told(caplog, "WARNING")] == [True]
    assert [": Held: " in line for line in told(caplog, "INFO")] == [False, False, True]


def test_causes_that_never_repeat_do_not_fill_the_memory(waits: Waits) -> None:
    for number in range(CAUSES_MAX + 10):
        waits.tell(log, WHERE, down("x" * number))

    assert len(waits._told) == CAUSES_MAX


def test_all_consumers_of_a_guard_share_what_was_told() -> None:
    one, other = Guard("memory:"), Guard("memory:")

    assert waits_of(one) is waits_of(one)
    assert waits_of(one) is not waits_of(other)


def test_a_message_is_found_by_its_queue_its_operation_and_its_digest() -> None:
    assert found_at("charges", ADDRESS) == WHERE
    assert found_at("charges", Address("", "charge", "")) == "charges: charge"
    assert found_at("", ADDRESS) == f"charge [key {ADDRESS.digest}]"
    assert found_at("forged\nline", Address("", "charge", "")) == r"'forged\nline': charge"


@pytest.mark.parametrize(
    ("scope", "key", "expected"),
    [
        (None, "pay-1", Address("", "charge", "pay-1")),
        ("acme", "pay-1", Address("acme", "charge", "pay-1")),
        (lambda: "acme", "pay-1", Address("acme", "charge", "pay-1")),
        (lambda: None, "pay-1", Address("", "charge", "")),
        ("acme", None, Address("", "charge", "")),
        ("acme", "\ud800", Address("", "charge", "")),
    ],
    ids=["plain", "scoped", "scoped by a function", "no scope", "no key", "no text"],
)
def test_the_address_is_that_of_the_record(scope: str, key: str | None, expected: Address) -> None:
    assert address_of(Guard("memory:", scope=scope), "charge", key) == expected


def test_a_dead_letter_is_told_to_all_who_listen() -> None:
    heard: list[Event] = []
    stop = subscribe(heard.append)
    buried(ADDRESS, "it failed 5 times")
    stop()

    assert [(event.kind, event.address, event.detail) for event in heard] == [
        (Kind.BURIED, ADDRESS, "it failed 5 times")
    ]
