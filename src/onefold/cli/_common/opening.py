"""Open the store that a command works on, without creating tables in the wrong one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from onefold import Guard, Policy
from onefold.cli._common.output import WRONG_USAGE, Refusal
from onefold.cli._common.store_option import display_url
from onefold.stores.base import Browsable, HasSchema
from onefold.stores.kinds import blocking, kind_of

CREATED_BY: Final = "A guard creates them with its first record, and `onefold schema --store URL --apply` at once"

IN_PROCESS: Final = "a memory store exists only inside its own process, so a command cannot read it"


@contextmanager
def opened(url: str, *, policy: Policy | None = None, may_be_new: bool = False) -> Iterator[Guard]:
    """Open a guard on the store behind this URL, which can list its records.

    Tables are created only if the store may be new. Otherwise they have to exist, and a command on the wrong database
    refuses: "nothing is held" would be a lie there.
    """
    if kind_of(url).in_process:
        raise Refusal(IN_PROCESS, WRONG_USAGE)
    with Guard(blocking(url), policy=policy) as guard:
        store = _store_of(guard)
        _check_browsable(store)
        if not may_be_new:
            check_schema(store, url)
        yield guard


def _store_of(guard: Guard) -> Any:
    try:
        return guard.store
    except ImportError as error:
        raise Refusal(f"the driver of this store is not installed: {error}") from error


def _check_browsable(store: Any) -> None:
    if not isinstance(store, Browsable):
        raise Refusal(
            f"{type(store).__name__} cannot list its records. Use guard.read, guard.resolve and guard.forget in Python"
        )


def check_schema(store: Any, url: str) -> None:
    """Raise `Refusal` unless the store's tables exist, and create none from now on, nor upgrade older ones."""
    missing = missing_schema(store, url)
    if missing is not None:
        raise Refusal(missing)


def missing_schema(store: Any, url: str) -> str | None:
    """Return a message that the store has no tables, and what to do; None if none is missing. Create none."""
    if not isinstance(store, HasSchema):
        return None
    path = getattr(store, "path", None)
    if isinstance(path, str) and not os.path.exists(path):
        return f"there is no file {path}, so there are no Onefold tables, and none were created. {CREATED_BY}"
    store.auto_schema = False
    if store.schema_exists():
        return None
    return (
        f"there are no Onefold tables in {display_url(url)}, and none were created. Is it the right store? {CREATED_BY}"
    )
