"""Parse rates, sizes and shares as a shell passes them, and print numbers as a person says them."""

from __future__ import annotations

import math
import re
from typing import Final

from onefold.cli._common.output import WRONG_USAGE, Refusal

_TIMES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "bn": 1e9, "g": 1e9}
_PER: Final = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3_600.0),
    **dict.fromkeys(("d", "day"), 86_400.0),
}
_BYTES: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "kib": 2**10, "mib": 2**20}
_RATE: Final = re.compile(r"([\d_,]*\.?\d+(?:e\d{1,2})?) ?(k|m|bn?|g|) ?/ ?(\w+)", re.IGNORECASE | re.ASCII)
_SIZE: Final = re.compile(r"([\d_,]*\.?\d+) ?([kmib]*)", re.IGNORECASE | re.ASCII)

# Ten thousand times what all of the world's messengers send: a larger number is a slip.
RATE_MAX: Final = 1e12

_LARGE: Final = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

# Below so many, a number is said as it is.
EXACT_MAX: Final = 1e6
# Three digits say enough of what is about right.
DIGITS: Final = 3


def rate_of(text: str, option: str) -> float:
    """Return the rate per second. Raises `Refusal`."""
    found = _RATE.fullmatch(text.strip())
    per = _PER.get(found[3].lower()) if found else None
    if found is None or per is None:
        raise Refusal(
            f"{option} {text!r} is not a rate: write a number and its time, such as 2000/s, 10k/min or 1bn/day",
            WRONG_USAGE,
        )
    rate = _number(found[1]) * _TIMES[found[2].lower()] / per
    if not 0 < rate <= RATE_MAX:
        raise Refusal(f"{option} {text}: give it more than nothing, and at most {RATE_MAX:.0e}/s", WRONG_USAGE)
    return rate


def bytes_of(text: str, option: str) -> int:
    """Return the size in bytes. Raises `Refusal`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _BYTES:
        raise Refusal(f"{option} {text!r} is not a size: write bytes such as 300, 2KB or 1KiB", WRONG_USAGE)
    return round(_number(found[1]) * _BYTES[found[2].lower()])


def share_of(text: str, option: str) -> float:
    """Return a share between 0 and 1, given as `5%` or `0.05`. Raises `Refusal`."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise Refusal(f"{option} {text!r} is not a share: write one from 0% to 100%, such as 5% or 0.05", WRONG_USAGE)
    return share


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def in_words(number: float) -> str:
    """Say a number: "950", "1,234", "5.18 billion"."""
    for large, word in _LARGE:
        if number >= large:
            return f"{_rounded(number / large)} {word}"
    return _rounded(number)


def in_bytes(number: float) -> str:
    """Say a size in the unit in which it has up to four digits: "254 bytes", "1.42 TiB"."""
    power = 0
    while number >= 1024 and power < len(_UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{_rounded(number)} {_UNITS[power]}"


def _rounded(number: float) -> str:
    """Round to three digits, and to a whole number from a hundred on."""
    if number <= 0:
        return "0"
    places = DIGITS - 1 - math.floor(math.log10(number))
    rounded = round(number, places)
    return f"{rounded:,.{max(places, 0)}f}".rstrip("0").rstrip(".") if places > 0 else f"{rounded:,.0f}"
