"""`onefold doctor`: report problems of a store, or of the stores of a configuration, and how to fix them."""

from __future__ import annotations

import os
import queue
import threading
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onefold import Guard, UsageError
from onefold.cli._common.durations import seconds_of
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    Refusal,
    note,
    on_terminal,
    print_json,
    visible,
)
from onefold.cli._common.store_option import StoresOption, Target, Unset, the_stores, without_secrets
from onefold.durations import as_text
from onefold.health import Check, Grade, Report, examine
from onefold.health.examine import unreachable
from onefold.stores.kinds import blocking

# Colour is never the only sign.
SYMBOLS: Final = {Grade.GREEN: "+", Grade.YELLOW: "!", Grade.RED: "x", Grade.UNKNOWN: "?"}
STYLES: Final = {Grade.GREEN: "green", Grade.YELLOW: "yellow", Grade.RED: "bold red", Grade.UNKNOWN: "dim"}

# An examination takes a fraction of a second; CI must not wait for a server that hangs.
TIMEOUT: Final = "30s"


def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for yellow as well.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long one store may take.")] = TIMEOUT,
    store: StoresOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Connect to a store, or to several, and report what is wrong with it and how to fix it.

    It creates no tables, and leaves no record behind. Exits with 0 if nothing is red, 1 if something is, 2 if a store
    cannot be reached or a configuration cannot be used.
    """
    patience = seconds_of(timeout, "--timeout")
    if patience == 0:
        raise Refusal("--timeout 0s leaves no time to answer", WRONG_USAGE)
    targets, reports = the_stores(store), list[Report]()
    for target in targets:
        report = _examined(target, patience, alone=len(targets) == 1)
        if format is Format.TABLE:
            _print(target, report, first=not reports)
        reports.append(report)
    if format is Format.JSON:
        print_json([_document(target, report) for target, report in zip(targets, reports, strict=True)])
    else:
        _sum_up(reports)
    raise typer.Exit(status(reports, strict=strict))


def status(reports: list[Report], *, strict: bool) -> int:
    """Return the exit status."""
    if not all(report.reached for report in reports):
        return WRONG_USAGE
    bad = (Grade.RED, Grade.YELLOW) if strict else (Grade.RED,)
    return FAILED if any(report.count(grade) for report in reports for grade in bad) else 0


def _examined(target: Target, patience: float, *, alone: bool) -> Report:
    """Return the report of one store, without secrets. A store that cannot be opened does not hide the others."""
    url = target.url
    if isinstance(url, Unset):
        return unreachable(f"{url}, so its store is unknown")
    try:
        found = _within(patience, url)
    except UsageError as error:
        text = without_secrets(str(error), url)
        if alone and not target.name:
            raise Refusal(text, WRONG_USAGE) from None
        return unreachable(text)
    checks = (check._replace(reason=without_secrets(check.reason, url)) for check in found.checks)
    return found._replace(checks=tuple(checks))


def _within(patience: float, url: str) -> Report:
    """Return the report within a bounded time, whatever the server does; a thread that hangs ends with the process."""
    answers: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(_report(url))
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            answers.put(error)

    threading.Thread(target=work, daemon=True, name="onefold-doctor").start()
    try:
        found = answers.get(timeout=min(patience, threading.TIMEOUT_MAX))
    except queue.Empty:
        return unreachable(f"it did not answer within {as_text(patience)}. If it is up, raise --timeout")
    if isinstance(found, BaseException):
        raise found
    return found


def _report(url: str) -> Report:
    with Guard(blocking(url)) as guard:
        try:
            store = guard.store
        except ImportError as error:
            return unreachable(f"the driver of this store is not installed: {error}")
        missing = _missing_file(store)
        return examine(store) if missing is None else unreachable(missing)


def _missing_file(store: object) -> str | None:
    """Report a missing SQLite file: a typo in a path would look like a store that nobody has used yet."""
    path = getattr(store, "path", None)
    if not isinstance(path, str) or os.path.exists(path) or not os.path.isdir(os.path.dirname(path)):
        return None
    return (
        f"there is no file {path}. Is the URL right? A guard creates the file with its first record, and "
        "`onefold schema --store URL --apply` at once"
    )


def _document(target: Target, report: Report) -> dict[str, object]:
    checks = [check._asdict() for check in report.checks]
    counts = {grade.value: report.count(grade) for grade in Grade}
    where = {"name": target.name or None, "store": target.place}
    return where | {"reached": report.reached, **counts, "checks": checks}


def _print(target: Target, report: Report, *, first: bool) -> None:
    """Print a table on a terminal; in a pipe one tab-separated line per check."""
    name, where = target.name, target.place
    title = f"{name} ({where})" if name else where
    if not on_terminal():
        if first:
            typer.echo("store\tgrade\tcheck\treason\tfix")
        for check in report.checks:
            cells = (name or where, check.grade.value, check.name, check.reason, check.fix)
            typer.echo("\t".join(visible(cell) or "-" for cell in cells))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False, title=None)
    for wraps in (False, False, True):
        table.add_column(no_wrap=not wraps, overflow="fold")
    for check in report.checks:
        table.add_row(_sign(check), Text(check.name), _text(check))
    console.print(Text(visible(title), style="bold"))
    console.print(table)


def _sign(check: Check) -> Text:
    return Text(f"{SYMBOLS[check.grade]} {check.grade.value}", style=STYLES[check.grade])


def _text(check: Check) -> Text:
    text = Text(visible(check.reason))
    if check.fix:
        text.append(f"\n-> {visible(check.fix)}", style="bold")
    return text


def _sum_up(reports: list[Report]) -> None:
    counts = (f"{sum(report.count(grade) for report in reports)} {grade.value}" for grade in Grade)
    stores = f"{len(reports)} stores: " if len(reports) > 1 else ""
    note(f"{stores}{', '.join(counts)}")
