"""`onefold copy`: copy the records of one store to another, so that a new store URL forgets nothing."""

from __future__ import annotations

import os
import shlex
from itertools import islice
from typing import Annotated, Final

import typer

from onefold import Guard
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    OperationOption,
    Refusal,
    ScopeOption,
    note,
    opened,
    print_json,
    visible,
)
from onefold.cli._common.progress import DryRunOption, into, summed_up
from onefold.cli._common.store_argument import display_url
from onefold.maintenance.copy import Tally, copying
from onefold.maintenance.pages import records
from onefold.stores.base import Browsable, Query
from onefold.stores.kinds import blocking

# If nothing matches, this many records are read, and this many of their operations are named: one page, and one line.
LOOKED_AT_MAX: Final = 1_000
NAMED_MAX: Final = 10


def copy(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The URL of the store to copy from. It is only read.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The URL of the store to copy to.")],
    scope: ScopeOption = None,
    operation: OperationOption = None,
    dry_run: DryRunOption = False,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Copy the records of one store to another. Records that NEW already has are not overwritten: you can run it again.

    Records that a worker is running right now are not copied: run it again when they have ended.

    Exits with 0 if NEW now has everything that OLD has, 1 if something was left out, or if no record of OLD has the
    operation or the scope that you named.
    """
    old, new, tally = blocking(old), blocking(new), Tally()
    if old == new:
        raise Refusal("OLD and NEW are the same store: there is nothing to copy", WRONG_USAGE)
    with opened(old) as source, opened(new, may_be_new=True) as target:
        if _path(source) is not None and _path(source) == _path(target):
            raise Refusal("OLD and NEW are the same file: there is nothing to copy", WRONG_USAGE)
        query, there = Query(scope=scope, operation=operation), into(target, new, dry_run=dry_run)
        with summed_up("copying", "records", lambda: _summary(tally, dry_run=dry_run) if tally.seen else "") as tell:
            for _ in copying(source.store, there, query, tally=tally, dry_run=dry_run):
                tell(tally.seen)
        unmatched = "" if tally.seen else _unmatched(source.store, query)
    complete = tally.complete and not unmatched
    _print(tally, format, complete=complete, dry_run=dry_run)
    if not tally.seen:
        note(unmatched or "there are no records in OLD")
    if tally.running:
        note(f"a worker runs {tally.running:,} of them, which were not copied. Run it again when they have ended")
    if tally.refused:
        note(f"{display_url(new)} does not take {tally.refused:,} of them: {tally.why}")
    if not complete:
        raise typer.Exit(FAILED)


def _path(guard: Guard) -> str | None:
    path = getattr(guard.store, "path", None)
    return os.path.realpath(path) if isinstance(path, str) else None


def _unmatched(store: Browsable, query: Query) -> str:
    """Say that nothing matches the options, which may be a typo; empty if they name nothing."""
    options = [("--scope", query.scope), ("--operation", query.operation)]
    named = " ".join(f"{option} {shlex.quote(visible(value))}" for option, value in options if value is not None)
    if not named:
        return ""
    said = f"no record of OLD matches {named}: nothing was copied"
    found = list(islice(records(store, query._replace(operation=None)), LOOKED_AT_MAX + 1))
    operations = sorted({visible(record.address.operation) for record in found})
    if query.operation is None or not operations:
        return said
    if len(found) <= LOOKED_AT_MAX and len(operations) <= NAMED_MAX:
        return f"{said}. Its operations are {', '.join(operations)}"
    are = "is" if len(operations[:NAMED_MAX]) == 1 else "are"
    return f"{said}. Among its operations {are} {', '.join(operations[:NAMED_MAX])}; `onefold stats` names all"


def _print(tally: Tally, format_: Format, *, complete: bool, dry_run: bool) -> None:
    if format_ is Format.JSON:
        counts = {name: getattr(tally, name) for name in ("seen", "copied", "updated", "there", "running", "refused")}
        print_json(counts | {"complete": complete, "dry_run": dry_run})
    else:
        typer.echo(_summary(tally, dry_run=dry_run))


def _summary(tally: Tally, *, dry_run: bool) -> str:
    parts = [f"{tally.copied:,} {'would be copied' if dry_run else 'copied'}"]
    if tally.updated:
        parts.append(f"{tally.updated:,} {'would be ' if dry_run else ''}finished in NEW, as they have ended in OLD")
    parts.append(f"{tally.there:,} already there")
    if tally.running:
        parts.append(f"{tally.running:,} running")
    if tally.refused:
        parts.append(f"{tally.refused:,} refused")
    return ", ".join(parts)
