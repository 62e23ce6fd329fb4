"""When the heartbeat renews, from when it counts a lease, and what it says of a renewal that fails or is late."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, Policy, StoreUnavailable
from onefold._heartbeat.async_guards import AsyncHeartbeat, LoopBeats
from onefold._heartbeat.beats import Beats
from onefold._heartbeat.sync_guards import Heartbeat
from onefold._model import Claim
from onefold.events import Teller
from onefold.keys import address
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from tests.support import PATIENCE, Clock, Heard, eventually, in_time

CHARGE = address("charge", "pay_1")
CLAIM = Claim(CHARGE, b"token", 30.0, 90.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The worker's own clock, moved by hand."""
    clock = Clock()
    monkeypatch.setattr("onefold._heartbeat.clock.monotonic", clock)
    return clock


def test_a_claim_is_renewed_three_times_a_lease(clock: Clock) -> None:
    beats = Beats()

    _, first = beats.add([CLAIM], sent=clock.now)
    moments = [first]
    for _ in range(3):
        assert beats.due(moments[-1] - 0.001) == []
        assert [beat.claim for beat in beats.due(moments[-1])] == [CLAIM]
        moments.append(beats.next_due())

    assert [moment - clock.now for moment in moments] == [10.0, 20.0, 30.0, 40.0]


class Slow:
    """A store whose answers take long, by the worker's clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        self.clock.advance(self.seconds)
        return [True for _ in claims]

    claim_all = close_all = extend_all


class AsyncSlow(Slow):
    """The async counterpart."""

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:  # type: ignore[override]
        return super().extend_all(claims)

    claim_all = close_all = extend_all  # type: ignore[assignment]


def test_a_lease_is_counted_from_the_sending_of_a_renewal_not_from_its_answer(clock: Clock) -> None:
    heartbeat = Heartbeat(lambda: Slow(clock, 25.0), Teller())
    heartbeat.beats.add([CLAIM], sent=clock.now)
    clock.advance(10.0)

    heartbeat.beat()

    # Sent at 10 s and answered at 35 s: the store may have counted from the first moment on.
    assert heartbeat.left(CLAIM) == 5.0


def test_an_async_lease_is_counted_from_the_sending_of_a_renewal_too(clock: Clock) -> None:
    async def story() -> float:
        heartbeat, here = AsyncHeartbeat(lambda: AsyncSlow(clock, 25.0), Teller()), LoopBeats()
        here.beats.add([CLAIM], sent=clock.now)
        clock.advance(10.0)
        await heartbeat.beat(here)
        assert here.timer is not None
        here.timer.cancel()
        return here.beats[CLAIM.token].left

    assert in_time(story()) == 5.0


# What it says.


class Warnings:
    """What becomes of renewals, and a handshake with whoever waits for the warning."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def warned(self) -> bool:
        return any(record.levelno == logging.WARNING for record in self._caplog.records)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Warnings]:
    with caplog.at_level(logging.WARNING, "onefold"):
        yield Warnings(caplog)


class Failing(MemoryStore):
    """A store that answers everything but renewals."""

    def __init__(self, renew: Callable[[], Any]) -> None:
        super().__init__()
        self.renew = renew

    def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        self.renew()
        return super().extend_all(claims)


class AsyncFailing(AsyncMemoryStore):
    """The async counterpart."""

    def __init__(self, renew: Callable[[], Any]) -> None:
        super().__init__()
        self.renew = renew

    async def extend_all(self, claims: Sequence[Claim]) -> list[bool]:
        await self.renew()
        return await super().extend_all(claims)


def down() -> None:
    raise StoreUnavailable("the database is being moved. Nothing ran. Wait")


async def down_async() -> None:
    down()


@contextmanager
def told(heard: Heard, detail: str) -> Iterator[None]:
    yield
    assert ("not_renewed", detail) in [(event.kind.value, event.detail) for event in heard.events]


def test_a_renewal_that_fails_is_a_warning_with_its_cause_before_the_lease_is_over(
    warnings: Warnings, long_lease: float
) -> None:
    heard = Heard()
    guard = Guard(Failing(down), policy=Policy(lease=long_lease), on_event=heard)

    with told(heard, "StoreUnavailable"):
        outcome = guard.run("charge", "pay_1", lambda: eventually(warnings.warned))
    guard.close()

    assert (outcome.value, outcome.recorded) == (True, True)
    assert f"charge [key {CHARGE.digest}]: the claim was not renewed" in warnings.lines[0]
    # The handler runs.
    assert "StoreUnavailable: the database is being moved. Wait" in warnings.lines[0]
    assert "pay_1" not in "".join(warnings.lines)


def test_an_async_renewal_that_fails_is_a_warning_too(warnings: Warnings, long_lease: float) -> None:
    heard = Heard()

    async def story() -> Any:
        guard = AsyncGuard(AsyncFailing(down_async), policy=Policy(lease=long_lease), on_event=heard)
        outcome = await guard.run("charge", "pay_1", lambda: asyncio.to_thread(eventually, warnings.warned))
        await guard.aclose()
        return outcome.value

    with told(heard, "StoreUnavailable"):
        assert in_time(story())
    assert "the database is being moved" in warnings.lines[0]


def test_a_renewal_that_takes_too_long_is_a_warning_while_it_is_under_way(
    warnings: Warnings, long_lease: float
) -> None:
    heard, warned = Heard(), threading.Event()
    guard = Guard(Failing(lambda: warned.wait(PATIENCE)), policy=Policy(lease=long_lease), on_event=heard)

    def handler() -> bool:
        seen = eventually(warnings.warned)
        warned.set()
        return seen

    with told(heard, "late"):
        outcome = guard.run("charge", "pay_1", handler)
    guard.close()

    assert outcome.value
    assert f"charge [key {CHARGE.digest}]: the claim was not renewed" in warnings.lines[0]
    assert "has not answered within" in warnings.lines[0]


def test_an_async_renewal_that_takes_too_long_is_given_up_and_a_warning(warnings: Warnings, long_lease: float) -> None:
    heard = Heard()

    async def story() -> Any:
        guard = AsyncGuard(AsyncFailing(asyncio.Event().wait), policy=Policy(lease=long_lease), on_event=heard)
        outcome = await guard.run("charge", "pay_1", lambda: asyncio.to_thread(eventually, warnings.warned))
        await guard.aclose()
        return outcome.value

    with told(heard, "late"):
        assert in_time(story())
    assert "has not answered within" in warnings.lines[0]


def test_one_line_tells_of_all_claims_that_were_not_renewed(warnings: Warnings, clock: Clock) -> None:
    heard = Heard()
    heartbeat = Heartbeat(lambda: Failing(down), Teller(heard))
    claims = [Claim(address("charge", str(number)), bytes([number]), 30.0, 90.0) for number in range(50)]
    heartbeat.beats.add(claims, sent=clock.now - 10.0)

    heartbeat.beat()

    assert len(warnings.lines) == 1
    assert "and 49 others" in warnings.lines[0]
    assert heard.kinds.count("not_renewed") == 50
