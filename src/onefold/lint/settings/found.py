"""A duration that a settings file has, and what it means for duplicates. Pure data."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple

from onefold.config.tree import Mark, location
from onefold.config.wording import shown

# `duplicates` and `replays` as in a guard; `shown` is reported, but says nothing about duplicates.
Role = Literal["duplicates", "replays", "visibility_timeout", "shown"]

MILLISECONDS: Final = 0.001

# Kafka's way to write "without a limit".
UNLIMITED: Final = -1

# Beyond this a number is a mistake: a million years, in milliseconds.
NUMBER_MAX: Final = 1 << 55


class Found(NamedTuple):
    """A setting, its location, and how late or how old a duplicate can be because of it, in seconds."""

    name: str
    role: Role
    seconds: float
    file: str
    line: int | None

    def __str__(self) -> str:
        where = location(self.file, None if self.line is None else Mark(self.line))
        return f"{self.name} ({where})"


class SettingsFile(NamedTuple):
    """A settings file, by the name that messages give it."""

    file: str
    text: str


class Wrong(ValueError):
    """A settings file that cannot be used: why, and in which line."""

    def __init__(self, file: str, line: int | None, says: str) -> None:
        super().__init__(says)
        self.file = file
        self.line = line


def number(file: str, line: int | None, name: str, value: Any, unit: str) -> int:
    """Return a whole number of this unit. Servers and clients write it as a number or as text."""
    text = str(value).strip().strip("\"'") if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not text.removeprefix("-").isdecimal() or len(text) > len(str(NUMBER_MAX)) or int(text) < UNLIMITED:
        raise Wrong(file, line, f"{name} is {shown(value)}, which is not a whole number of {unit}")
    return int(text)


def milliseconds(file: str, line: int | None, name: str, value: Any) -> float:
    """Return a number of milliseconds in seconds; -1 is without a limit."""
    found = number(file, line, name, value, "milliseconds")
    return math.inf if found == UNLIMITED else found * MILLISECONDS
