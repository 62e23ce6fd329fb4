"""The tables of a store, by hand: what `onefold schema` prints and applies.

A store that has tables has two functions in its module: `describe_schema(url)`, the text that a person can apply, and
`apply_schema(url)`, which applies it and says what it did. A store without them needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from onefold.stores.opening import module_of

# Of every SQL database, for whoever makes and drops them by a migration of their own.
TABLES: Final = ("onefold_records", "onefold_schema")


def describe(url: str) -> str | None:
    """What makes the tables, in the language of the store. None: it needs none."""
    return cast("str | None", _asked(url, "describe_schema"))


def apply(url: str) -> list[str] | None:
    """Make the tables, or bring them to the form of this version; what was done, line by line. None: it needs none."""
    return cast("list[str] | None", _asked(url, "apply_schema"))


def _asked(url: str, name: str) -> Any:
    function: Callable[[str], Any] | None = getattr(module_of(url), name, None)
    return None if function is None else function(url)
