"""How figures are written, in the table and on the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def duration(microseconds: float) -> str:
    """Write a time with three digits: `8.14 µs`, `240 µs`, `1.31 ms`."""
    if microseconds < 1_000:
        return f"{_three_digits(microseconds)} µs"
    return f"{_three_digits(microseconds / 1_000)} ms"


def ratio(spread: Sequence[float]) -> str:
    """Write a median with its quartiles: `0.87 (0.84–0.91)`."""
    low, median, high = spread
    return f"{times(median)} ({times(low)}–{times(high)})"


def times(value: float) -> str:
    """Write a ratio so that small ones keep two digits that count."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def speed(per_second: float) -> str:
    return f"{per_second:,.0f}/s"


def figure(bar: dict[str, Any]) -> str:
    """Write what a bar found: `1.07 ×`, `221 bytes`, and against whom."""
    if "found" not in bar:
        return "not measured in this run"
    value = times(bar["found"]) if bar["unit"] == "×" else f"{bar['found']:,.0f}"
    found = f"{value} {bar['unit'].strip()}"
    told = f"{found} ({bar['of']})" if bar["of"] else found
    return f"{told}; our statements alone: {times(bar['floor'])} ×" if "floor" in bar else told


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
