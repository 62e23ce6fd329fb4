"""`onefold import`: turn the rows of a hand-made table into records of a store."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from onefold.cli._common.durations import seconds_of
from onefold.cli._common.opening import opened
from onefold.cli._common.output import FAILED, WRONG_USAGE, Format, FormatOption, Refusal, note, print_json
from onefold.cli._common.progress import DryRunOption, into, summed_up
from onefold.cli._common.store_option import store_named
from onefold.health.report import counted
from onefold.maintenance.imports import Rows, Tally, importing
from onefold.maintenance.table import Table
from onefold.stores.table_reader import reading

# The command does not know how late duplicates can come, and a finished delivery must not run again.
KEEP: Final = "forever"


def import_table(
    database: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DATABASE",
            show_default=False,
            help="The database with the table: postgresql://, mysql://, sqlite:, or a name in onefold.yaml. Required.",
        ),
    ] = "",
    store: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="STORE",
            show_default=False,
            help="The store: its URL, or its name in onefold.yaml. Required.",
        ),
    ] = "",
    table: Annotated[str, typer.Option("--table", help="The table, or a view. Required.", show_default=False)] = "",
    key: Annotated[str, typer.Option("--key", help="The column with the key. Required.", show_default=False)] = "",
    operation: Annotated[
        str | None, typer.Option("--operation", show_default=False, help="The operation of all rows.")
    ] = None,
    operation_column: Annotated[
        str | None,
        typer.Option("--operation-column", show_default=False, help="The column with the operation, if rows differ."),
    ] = None,
    scope_column: Annotated[
        str | None, typer.Option("--scope-column", show_default=False, help="The column with the tenant or caller.")
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", show_default=False, help="The column that says when it was done.")
    ] = None,
    result_column: Annotated[
        str | None,
        typer.Option("--result-column", show_default=False, help="The column with the result that duplicates get."),
    ] = None,
    keep: Annotated[str, typer.Option("--keep", help="How long a record is kept, from --at on, such as 30d.")] = KEEP,
    dry_run: DryRunOption = False,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Turn the rows of a table that remembers what was done, such as processed_messages, into finished records.

    The table is only read. Records that the store already has are not overwritten: you can run it again.

    Exits with 0 if every row was imported, already known or expired, 1 if some could not be used.
    """
    if not (database and store and table and key):
        raise Refusal("pass --from DATABASE, --to STORE, --table NAME and --key COLUMN", WRONG_USAGE)
    if operation is not None and operation_column is not None:
        raise Refusal(
            "--operation is for all rows, --operation-column for rows that differ: pass one of them", WRONG_USAGE
        )
    if operation is None and operation_column is None:
        raise Refusal("name the operation: --operation NAME, or --operation-column COLUMN if rows differ", WRONG_USAGE)
    ttl = seconds_of(keep, "--keep")
    if ttl == 0:
        raise Refusal("--keep 0s would import nothing", WRONG_USAGE)
    columns = Table(table, key, scope_column, operation_column, at, result_column)
    url, tally = store_named(store), Tally()
    with (
        reading(store_named(database)) as reader,
        opened(url, may_be_new=True) as target,
        summed_up("importing", "rows", lambda: _summary(tally, dry_run=dry_run) if tally.seen else "") as tell,
    ):
        rows = Rows(reader, columns, operation=operation, keep=ttl)
        for _ in importing(rows, into(target, url, dry_run=dry_run), tally=tally, dry_run=dry_run):
            tell(tally.seen)
    _print(tally, format, dry_run=dry_run)
    for reason in tally.reasons.values():
        row = "" if reason.row is None else f" (the first is row {reason.row:,} in the order of {columns.order})"
        note(f"{counted(reason.count, 'row')} could not be used: {reason.why}{row}")
    if tally.unusable:
        raise typer.Exit(FAILED)


def _print(tally: Tally, format_: Format, *, dry_run: bool) -> None:
    if format_ is Format.JSON:
        counts = {name: getattr(tally, name) for name in ("seen", "imported", "there", "over", "merged", "unusable")}
        reasons = [{"why": one.why, "count": one.count, "row": one.row} for one in tally.reasons.values()]
        print_json(counts | {"complete": not tally.unusable, "dry_run": dry_run, "reasons": reasons})
    else:
        typer.echo(_summary(tally, dry_run=dry_run))


def _summary(tally: Tally, *, dry_run: bool) -> str:
    parts = [f"{tally.imported:,} {'would be imported' if dry_run else 'imported'}", f"{tally.there:,} already there"]
    if tally.over:
        parts.append(f"{tally.over:,} done longer ago than --keep")
    if tally.merged:
        parts.append(f"{tally.merged:,} of a key that another row has")
    if tally.unusable:
        parts.append(f"{tally.unusable:,} not usable")
    return ", ".join(parts)
