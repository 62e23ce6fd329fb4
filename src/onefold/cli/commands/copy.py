"""`onefold copy`: copy the records of one store to another, so that a new store URL forgets nothing."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from onefold import Guard
from onefold.cli._common.find import unmatched
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    OperationOption,
    Refusal,
    ScopeOption,
    note,
    print_json,
)
from onefold.cli._common.progress import DryRunOption, into, summed_up
from onefold.cli._common.store_option import display_url, store_named
from onefold.maintenance.copy import Tally, copying
from onefold.stores.base import Query
from onefold.stores.kinds import blocking


def copy(
    old: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="OLD",
            show_default=False,
            help="The store to copy from: its URL, or its name in onefold.yaml. It is only read. Required.",
        ),
    ] = "",
    new: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NEW",
            show_default=False,
            help="The store to copy to, named in the same ways. Required.",
        ),
    ] = "",
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
    if not (old and new):
        raise Refusal("from which store to which? Pass --from OLD and --to NEW", WRONG_USAGE)
    old, new, tally = blocking(store_named(old)), blocking(store_named(new)), Tally()
    if old == new:
        raise Refusal("OLD and NEW are the same store: there is nothing to copy", WRONG_USAGE)
    with opened(old) as source, opened(new, may_be_new=True) as target:
        if _path(source) is not None and _path(source) == _path(target):
            raise Refusal("OLD and NEW are the same file: there is nothing to copy", WRONG_USAGE)
        query, there = Query(scope=scope, operation=operation), into(target, new, dry_run=dry_run)
        with summed_up("copying", "records", lambda: _summary(tally, dry_run=dry_run) if tally.seen else "") as tell:
            for _ in copying(source.store, there, query, tally=tally, dry_run=dry_run):
                tell(tally.seen)
        mistyped = "" if tally.seen else unmatched(source.store, query, of="OLD", done="copied")
    complete = tally.complete and not mistyped
    _print(tally, format, complete=complete, dry_run=dry_run)
    if not tally.seen:
        note(mistyped or "there are no records in OLD")
    if tally.running:
        note(f"a worker runs {tally.running:,} of them, which were not copied. Run it again when they have ended")
    if tally.refused:
        note(f"{display_url(new)} does not accept {tally.refused:,} of them: {tally.why}")
    if not complete:
        raise typer.Exit(FAILED)


def _path(guard: Guard) -> str | None:
    path = getattr(guard.store, "path", None)
    return os.path.realpath(path) if isinstance(path, str) else None


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
