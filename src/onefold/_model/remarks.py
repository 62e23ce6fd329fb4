"""Compose and read the remark of a record: what people are told about it, the latest first.

A remark says why a record is held or was released, or who resolved it. Resolutions, and what was said before them, stay
behind it as its history. Pure.
"""

from __future__ import annotations

from typing import Final

# The first words of the remark of a record that was resolved by hand, and of one that was released.
RESOLVED: Final = "resolved as "
RELEASED: Final = "released: "

# The separator before earlier remarks, and how it is written inside one: it must not look like more history.
BEFORE: Final = " | before: "
_INSIDE: Final = "/ before:"

# The text of an error comes last in a remark, after these words.
_SAID: Final = ", which said: "


def latest_of(remark: str) -> str:
    """Return a remark without the earlier ones."""
    return remark.partition(BEFORE)[0]


def earlier_in(remark: str) -> str:
    """Return what a later run of a record keeps of its remark: who resolved it, and what was said before."""
    if remark.startswith(RESOLVED):
        return BEFORE + remark
    return "".join(remark.partition(BEFORE)[1:])


def as_part(text: str) -> str:
    """Return a text from outside as it may stand in a remark."""
    return text.replace(BEFORE.strip(), _INSIDE)


def saying(line: str) -> str:
    """Return the end of a remark that quotes an error; empty without a line."""
    return f"{_SAID}{as_part(line)}" if line else ""


def without_error_text(remark: str) -> str:
    """Return a held record's remark for callers, logs and events: the text of an error is only in the record."""
    return remark.partition(_SAID)[0]
