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

# The first words about a run that somebody asked for by name, although it was finished.
BYPASSED: Final = "bypassed as "
# One line for people. A longer name would push resolutions out of the history.
NAME_MAX: Final = 200

# Corrections of corrections are rare. The oldest of them are left out, so that a script cannot fill the record.
HISTORY_MAX: Final = 4_000
# So that the latest of them are always whole.
SIGNED_MAX: Final = 1_000
LEFT_OUT: Final = "earlier resolutions were left out"

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


def bypassing(remark: str, *, name: bool | str) -> str:
    """Return what a run keeps of the remark that it found, and the name of the bypass that it is, if it has one."""
    earlier = earlier_in(remark)
    if not isinstance(name, str) or was_bypassed(earlier, name=name):
        return earlier
    history = [_bypass(name), *filter(None, earlier.split(BEFORE))]
    return BEFORE + BEFORE.join(bounded(history))


def was_bypassed(remark: str, *, name: bool | str) -> bool:
    """Return whether a bypass of this name has run to its end before: its messages are duplicates, too."""
    return isinstance(name, str) and _bypass(name) in remark.split(BEFORE)


def _bypass(name: str) -> str:
    return f"{BYPASSED}{as_part(name)}"


def bounded(history: list[str]) -> list[str]:
    """Leave out the oldest resolutions of too many; keep the latest, and the first remark: why it was held."""
    if len(BEFORE.join(history)) <= HISTORY_MAX:
        return history
    *resolutions, first = (one for one in history if one != LEFT_OUT)
    first = first if len(first) <= SIGNED_MAX else f"{first[:SIGNED_MAX]}…"
    while resolutions and len(BEFORE.join((*resolutions, LEFT_OUT, first))) > HISTORY_MAX:
        resolutions.pop()
    return [*resolutions, LEFT_OUT, first]


def as_part(text: str) -> str:
    """Return a text from outside as it may stand in a remark."""
    return text.replace(BEFORE.strip(), _INSIDE)


def saying(line: str) -> str:
    """Return the end of a remark that quotes an error; empty without a line."""
    return f"{_SAID}{as_part(line)}" if line else ""


def without_error_text(remark: str) -> str:
    """Return a held record's remark for callers, logs and events: the text of an error is only in the record."""
    return remark.partition(_SAID)[0]
