"""Planned times at equal distances: every case of a small world, and the limits of a large one."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from onefold import FOREVER, UsageError
from onefold._schedule.slots import (
    ANCHOR,
    EARLY_MAX,
    EVERY_MIN,
    LATE_PART,
    SLOTS_MAX,
    Slots,
    in_utc,
    is_too_late,
    slots_of,
    text_of,
)

TICK = timedelta(microseconds=1)
NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


def every_small_world() -> list[Slots]:
    return [
        Slots(every * TICK, ANCHOR + anchor * TICK, early * TICK)
        for every in range(1, 9)
        for early in range(every)
        for anchor in (-5, 0, 1, 7)
    ]


def test_each_moment_belongs_to_exactly_one_slot() -> None:
    for slots, at in itertools.product(every_small_world(), range(-40, 41)):
        moment = ANCHOR + at * TICK
        slot = slots.slot_of(moment)

        assert (slot - slots.anchor) % slots.every == timedelta(0)
        assert slot - slots.early <= moment < slot + slots.every - slots.early


def test_whoever_fires_within_the_tolerance_means_the_same_slot() -> None:
    for slots in every_small_world():
        planned = slots.anchor + 3 * slots.every
        room = slots.every - slots.early
        offsets = range(-(slots.early // TICK), room // TICK)

        assert {slots.slot_of(planned + offset * TICK) for offset in offsets} == {planned}
        # And no further.
        assert slots.slot_of(planned - slots.early - TICK) == planned - slots.every
        assert slots.slot_of(planned + room) == planned + slots.every


def test_a_slot_belongs_to_itself_and_time_never_goes_back() -> None:
    for slots in every_small_world():
        found = [slots.slot_of(ANCHOR + at * TICK) for at in range(-40, 41)]

        assert found == sorted(found)
        assert [slots.slot_of(slot) for slot in found] == found


def test_the_slots_between_two_moments_are_all_of_them_once() -> None:
    for slots, (start, end) in itertools.product(every_small_world(), [(-20, 20), (0, 0), (-3, 4), (5, 2)]):
        since, until = ANCHOR + start * TICK, ANCHOR + end * TICK
        wanted = [
            moment
            for moment in (ANCHOR + at * TICK for at in range(start + 1, end + 1))
            if (moment - slots.anchor) % slots.every == timedelta(0)
        ]

        assert list(slots.between(since, until)) == wanted


@pytest.mark.parametrize(
    ("every", "moment", "planned"),
    [
        ("1h", "2026-11-18T14:00:00", "2026-11-18T14:00:00Z"),
        # 50 ms too early by its own clock, and five seconds; not six.
        ("1h", "2026-11-18T13:59:59.950", "2026-11-18T14:00:00Z"),
        ("1h", "2026-11-18T13:59:55", "2026-11-18T14:00:00Z"),
        ("1h", "2026-11-18T13:59:54", "2026-11-18T13:00:00Z"),
        ("1h", "2026-11-18T14:59:54", "2026-11-18T14:00:00Z"),
        ("1d", "2026-11-18T23:59:50", "2026-11-18T00:00:00Z"),
        # Weeks begin on Mondays.
        ("7d", "2026-11-18T14:00:00", "2026-11-16T00:00:00Z"),
        ("10s", "2026-11-18T14:00:08.999999", "2026-11-18T14:00:00Z"),
        ("10s", "2026-11-18T14:00:09", "2026-11-18T14:00:10Z"),
        (0.1, "2026-11-18T14:00:00.095", "2026-11-18T14:00:00.100000Z"),
        # It does not divide a day, and goes on over midnight.
        ("7h", "2026-11-18T23:00:00", "2026-11-18T22:00:00Z"),
    ],
)
def test_the_planned_time_by_default(every: float | str, moment: str, planned: str) -> None:
    assert text_of(slots_of(every).slot_of(datetime.fromisoformat(f"{moment}+00:00"))) == planned


def test_a_tenth_of_a_second_is_exact_for_a_thousand_years() -> None:
    slots = slots_of(0.1)
    late = datetime(2999, 1, 1, 0, 0, 0, 300_000, tzinfo=UTC)

    assert slots.slot_of(late) == late


def test_the_anchor_moves_the_slots() -> None:
    slots = slots_of("1d", datetime(2020, 5, 5, 2, 30, tzinfo=UTC), "10m")

    assert text_of(slots.slot_of(NOON)) == "2026-11-18T02:30:00Z"
    assert text_of(slots.slot_of(datetime(2026, 11, 18, 2, 20, tzinfo=UTC))) == "2026-11-18T02:30:00Z"
    assert text_of(slots.slot_of(datetime(2026, 11, 18, 2, 19, tzinfo=UTC))) == "2026-11-17T02:30:00Z"


def test_equal_moments_have_equal_texts_and_an_hour_that_comes_twice_has_two() -> None:
    there = ZoneInfo("Europe/Berlin")
    moments = [NOON, NOON.astimezone(there), NOON.astimezone(timezone(timedelta(hours=-7)))]
    twice = [datetime(2026, 10, 25, 2, 30, tzinfo=there, fold=fold) for fold in (0, 1)]

    assert {text_of(moment) for moment in moments} == {"2026-11-18T12:00:00Z"}
    assert [text_of(moment) for moment in twice] == ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"]


@pytest.mark.parametrize(
    ("hours", "keep", "is_late"),
    [(0, 3600.0, False), (-5, 3600.0, False), (0.89, 3600.0, False), (0.91, 3600.0, True), (9e6, FOREVER, False)],
)
def test_a_planned_time_is_too_late_before_its_record_can_be_gone(hours: float, keep: float, is_late: bool) -> None:
    assert is_too_late(NOON - timedelta(hours=hours), NOON, keep) is is_late
    assert LATE_PART < 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": "0s"}, "every="),
        ({"every": EVERY_MIN / 2}, "0.1 s or more"),
        ({"every": "forever"}, "not forever"),
        ({"every": "hourly"}, "every='hourly' is not a duration"),
        ({"every": "1h", "early": "1h"}, "less than every"),
        ({"every": "1h", "early": -1}, "negative"),
        ({"every": "1h", "anchor": datetime(2026, 1, 1)}, "has no time zone"),  # noqa: DTZ001 - that is the mistake
        ({"every": "1h", "anchor": "2026-01-01"}, "anchor has to be a datetime, not str"),
    ],
)
def test_wrong_slots_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        slots_of(**options)  # type: ignore[arg-type]


def test_bounds() -> None:
    slots = slots_of("1s")
    end = ANCHOR + timedelta(seconds=SLOTS_MAX)

    assert len(list(slots.between(ANCHOR, end))) == SLOTS_MAX
    with pytest.raises(UsageError, match="the limit is 10000"):
        slots.between(ANCHOR, end + timedelta(seconds=1))
    assert slots_of("1w").early == timedelta(seconds=EARLY_MAX)
    assert in_utc(NOON, "now") is not None
