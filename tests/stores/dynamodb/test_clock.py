"""DynamoDB's clock, as its replies tell it: bounds that hold, whatever the machines and the network do."""

from __future__ import annotations

import math
import random
from email.utils import formatdate

import pytest

from onefold.stores.dynamodb.clock import CLOCK_MARGIN, FRESH, RESOLUTION, DateClock, count_seconds

# Some time of day.
EPOCH = 1_800_000_000.0


class World:
    """The right time, a machine whose counter is wrong, and replies that take their time."""

    def __init__(self, *, offset: float = 0.0, rate: float = 1.0) -> None:
        self.time = EPOCH
        self._offset = offset
        self._rate = rate
        self.clock = DateClock(self.ticks)

    def ticks(self) -> float:
        return (self.time - EPOCH) * self._rate + self._offset

    def reply(self, *, there: float = 0.0, back: float = 0.0, skew: float = 0.0) -> None:
        """A reply of a server whose clock is so far off."""
        sent = self.ticks()
        self.time += there
        date = formatdate(math.floor(self.time + skew), usegmt=True)
        self.time += back
        self.clock.hear(date, sent)

    @property
    def width(self) -> float:
        now = self.clock.now()
        return now.latest - now.earliest


def test_without_a_reply_there_is_no_clock() -> None:
    assert not World().clock.is_fresh


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sun, 99 Nov 2026 05:41:01 GMT"])
def test_a_reply_without_a_date_says_nothing(date: str | None) -> None:
    world = World()

    world.clock.hear(date, 0.0)

    assert not world.clock.is_fresh


def test_one_reply_tells_the_time_to_a_second_and_the_margin() -> None:
    world = World(offset=-77.0)
    world.time += 0.7

    world.reply(there=0.004, back=0.006)

    now = world.clock.now()
    assert now.earliest <= world.time <= now.latest
    assert world.width == pytest.approx(RESOLUTION + 2 * CLOCK_MARGIN + 0.01, abs=1e-3)


def test_replies_bring_the_bounds_closer() -> None:
    world = World()

    for _ in range(20):
        world.reply(there=0.01, back=0.01)
        world.time += 0.13

    assert world.width < 2 * CLOCK_MARGIN + 0.2


def test_a_slow_reply_does_no_harm() -> None:
    world = World()
    world.reply(there=0.01, back=0.01)
    before = world.width

    world.reply(there=20.0, back=20.0)

    assert world.width < before + 0.2
    assert world.clock.now().earliest <= world.time <= world.clock.now().latest


def test_the_right_time_is_always_between_the_bounds() -> None:
    random.seed(4)
    for _ in range(200):
        # Machines that were set wrong, whose counters are too quick or too slow; servers that disagree.
        world = World(offset=random.uniform(-1e6, 1e6), rate=random.uniform(0.9995, 1.0005))
        for _ in range(50):
            skew = random.uniform(-CLOCK_MARGIN, CLOCK_MARGIN)
            world.reply(there=random.expovariate(20), back=random.expovariate(20), skew=skew)
            world.time += random.choice((0.0, 0.3, 7.0, 500.0))
            now = world.clock.now()
            assert now.earliest <= world.time <= now.latest
            assert not world.clock.was_behind(now)


def test_no_machine_sees_the_end_of_a_lease_too_early() -> None:
    random.seed(5)
    for _ in range(200):
        owner = World(offset=random.uniform(-1e6, 1e6), rate=random.uniform(0.9995, 1.0005))
        another = World(offset=random.uniform(-1e6, 1e6), rate=random.uniform(0.9995, 1.0005))
        owner.time = another.time = EPOCH + random.random()
        owner.reply(there=0.1, back=0.1, skew=random.uniform(-CLOCK_MARGIN, CLOCK_MARGIN))
        another.reply(there=0.1, back=0.1, skew=random.uniform(-CLOCK_MARGIN, CLOCK_MARGIN))
        lease_until = owner.clock.now().latest + 10.0
        ends = owner.time + 10.0

        another.time = ends - 0.001
        another.reply(skew=random.uniform(-CLOCK_MARGIN, CLOCK_MARGIN))
        assert another.clock.now().earliest < lease_until

        # And not much too late.
        another.time = ends + 8 * CLOCK_MARGIN
        assert another.clock.now().earliest > lease_until


def test_a_machine_that_slept_uncounted_believes_the_next_reply() -> None:
    world = World()
    world.reply()
    before = world.clock.now()
    # Ten minutes pass, and the counter does not know of them.
    world._offset -= 600.0
    world.time += 600.0

    assert world.clock.now().latest < world.time
    world.reply()

    assert world.clock.now().earliest <= world.time <= world.clock.now().latest
    assert world.clock.was_behind(before)
    assert not world.clock.was_behind(world.clock.now())


def test_a_clock_that_heard_nothing_for_long_is_not_fresh() -> None:
    world = World()
    world.reply()

    world.time += FRESH - 1
    assert world.clock.is_fresh
    world.time += 2
    assert not world.clock.is_fresh
    world.reply()
    assert world.clock.is_fresh


def test_the_counter_only_goes_on() -> None:
    one, two = count_seconds(), count_seconds()

    assert one <= two
