"""The common progress and summary of the commands that go through a whole store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

from onefold import Guard, StoreUnavailable
from onefold.cli._common.opening import missing_schema
from onefold.cli._common.output import INTERRUPTED, Refusal, counting, note
from onefold.stores.memory import MemoryStore

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Count only; write nothing.")]

AGAIN: Final = "Run it again for the rest"


@contextmanager
def summed_up(what: str, unit: str, summary: Callable[[], str]) -> Iterator[Callable[[int], None]]:
    """Show progress for work that may be stopped at any time: then print how far it came, if anywhere."""
    try:
        with counting(what, unit) as tell:
            yield tell
    except KeyboardInterrupt:
        note(f"stopped: {summary() or 'nothing was done yet'}. {AGAIN}")
        raise typer.Exit(INTERRUPTED) from None
    except StoreUnavailable as error:
        how_far = summary()
        raise Refusal(f"{error}. Until then: {how_far}. {AGAIN}" if how_far else str(error)) from error


def into(guard: Guard, url: str, *, dry_run: bool) -> Any:
    """Return the store to write to. In a dry run a store without tables counts as empty, and none are created."""
    if not dry_run:
        return guard.store
    missing = missing_schema(guard.store, url)
    if missing is None:
        return guard.store
    note(missing)
    return MemoryStore()
