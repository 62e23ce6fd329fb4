"""Medians, quartiles and ratios, with known numbers."""

from __future__ import annotations

import pytest

from bench.compare.spread import Spread, percentile, ratios, spread_of
from bench.compare.throughput import compared, orders


def test_a_spread_is_the_median_between_its_quartiles() -> None:
    assert spread_of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert spread_of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1), (0.001, 1)], ids=str)
def test_a_percentile_is_the_value_that_this_share_does_not_exceed(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_the_ratio_is_taken_block_by_block() -> None:
    # In the second half the machine is three times as slow, for both: the ratio stays.
    ours = [2.0, 2.0, 2.0, 6.0, 6.0, 6.0]
    theirs = [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]

    assert ratios(ours, theirs, blocks=2) == Spread(2.0, 2.0, 2.0)


def test_one_slow_call_does_not_move_its_block() -> None:
    ours = [2.0, 500.0, 2.0, 2.0, 2.0, 2.0]

    assert ratios(ours, [1.0] * 6, blocks=2).median == 2.0


def test_the_quartiles_show_that_the_blocks_differ() -> None:
    ours = [1.0, 2.0, 3.0, 4.0, 5.0]

    assert ratios(ours, [1.0] * 5, blocks=5) == Spread(2.0, 3.0, 4.0)


def test_no_call_is_left_out_of_the_blocks() -> None:
    assert ratios([1.0, 1.0, 1.0, 3.0, 3.0], [1.0] * 5, blocks=2).median == 2.0


def test_fewer_calls_than_blocks_are_a_block_each() -> None:
    assert ratios([3.0, 3.0], [2.0, 2.0]) == Spread(1.5, 1.5, 1.5)


def test_sides_that_were_not_measured_in_turn_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="3 rounds against 2"):
        ratios([1.0, 1.0, 1.0], [1.0, 1.0])


def test_no_values_have_no_spread_and_no_percentile() -> None:
    with pytest.raises(ValueError, match="no spread"):
        spread_of([])
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 0.5)


def test_each_round_of_the_throughput_begins_with_the_next_side() -> None:
    assert orders(3, rounds=3) == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_a_side_that_delivers_twice_as_much_makes_ours_take_twice_as_long() -> None:
    assert compared([200.0, 400.0], [100.0, 200.0]) == {"per_second": 300.0, "ratio": [2.0, 2.0, 2.0]}
