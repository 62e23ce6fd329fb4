"""Describe and apply the tables of a store, for `onefold schema`.

The module of a store with tables has two functions: `describe_schema(url)` returns a text that a person can apply, and
`apply_schema(url)` applies it and reports what it did. A store without them needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from onefold.stores.opening import module_of

# The tables in every SQL database, for migrations that create and drop them.
TABLES: Final = ("onefold_records", "onefold_schema")

# The beginning of what partitions are called.
PARTITIONS: Final = "onefold_records_"


def describe(url: str) -> str | None:
    """Return the definition of the tables, in the language of the store. None: it needs none."""
    return cast("str | None", _asked(url, "describe_schema"))


def apply(url: str) -> list[str] | None:
    """Create the tables, or upgrade them to this version; return what was done, line by line. None: it needs none."""
    return cast("list[str] | None", _asked(url, "apply_schema"))


def _asked(url: str, name: str) -> Any:
    function: Callable[[str], Any] | None = getattr(module_of(url), name, None)
    return None if function is None else function(url)
