"""Substitute environment variables for `${NAME}`; `$${` stands for the two characters. No message shows a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")


class Filled(str):
    """A text with the values of its variables. Messages show it as it was written."""

    written: str

    @classmethod
    def of(cls, value: str, written: str) -> Filled:
        filled = cls(value)
        filled.written = written
        return filled

    def __repr__(self) -> str:
        return repr(self.written)


class NotSet(LookupError):
    """A variable that a text names is not set; the message is its name."""


def fill(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with its variables substituted. Raise `NotSet`, or `ValueError` for a `${` without a name."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        if found[1] is None:
            raise ValueError("'${' begins a variable such as ${DATABASE_URL}; write $${ for the two characters")
        if found[1] not in environment:
            raise NotSet(found[1])
        return environment[found[1]]

    filled = VARIABLE.sub(value, text)
    return Filled.of(filled, text) if "${" in text else text
