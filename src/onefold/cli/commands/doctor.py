"""`onefold doctor`: report what is wrong with a store, or with the stores of a configuration, and how to fix it."""

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
from onefold.cli._common.store_argument import (
    Unset,
    WhereArgument,
    display_url,
    named,
    stores_to_examine,
    without_secrets,
)
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
    where: WhereArgument = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for yellow, too.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long one store may take.")] = TIMEOUT,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Connect to a store, or to every store of a file, and report what is wrong with it and how to fix it.

    It creates no tables, and leaves no record behind. Exits with 0 if nothing is red, 1 if something is, 2 if a store
    cannot be reached or the file cannot be used.
    """
    patience = seconds_of(timeout, "--timeout")
    if patience == 0:
        raise Refusal("--timeout 0s leaves no time to answer", WRONG_USAGE)
    examined: list[tuple[str, str, Report]] = []
    for name, url in stores_to_examine(named(where)):
        if isinstance(url, Unset):
            at, report = url.display_url, unreachable(f"{url}: its store is not known")
        else:
            at, report = display_url(url), _examined(name, url, patience)
        if format is Format.TABLE:
            _print(name, at, report, first=not examined)
        examined.append((name, at, report))
    reports = [report for _, _, report in examined]
    if format is Format.JSON:
        print_json([_document(name, at, report) for name, at, report in examined])
    else:
        _sum_up(reports)
    raise typer.Exit(status(reports, strict=strict))


def status(reports: list[Report], *, strict: bool) -> int:
    """Return the exit status."""
    if not all(report.reached for report in reports):
        return WRONG_USAGE
    bad = (Grade.RED, Grade.YELLOW) if strict else (Grade.RED,)
    return FAILED if any(report.count(grade) for report in reports for grade in bad) else 0


def _examined(name: str, url: str, patience: float) -> Report:
    """Return the report of one store, without secrets. One that cannot be opened does not hide the others of a file."""
    try:
        found = _within(patience, url)
    except UsageError as error:
        text = without_secrets(str(error), url)
        if not name:
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
        except BaseException as error:  # noqa: BLE001 - it is raised by whoever waits
            answers.put(error)

    threading.Thread(target=work, daemon=True, name="onefold-doctor").start()
    try:
        found = answers.get(timeout=min(patience, threading.TIMEOUT_MAX))
    except queue.Empty:
        return unreachable(f"it did not answer within {as_text(patience)}. Is it up? Then raise --timeout")
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
        "`onefold schema URL --apply` at once"
    )


def _document(name: str, where: str, report: Report) -> dict[str, object]:
    checks = [check._asdict() for check in report.checks]
    counts = {grade.value: report.count(grade) for grade in Grade}
    return {"store": name or None, "place": where, "reached": report.reached, **counts, "checks": checks}


def _print(name: str, where: str, report: Report, *, first: bool) -> None:
    """Print a table on a terminal; in a pipe one tab-separated line per check."""
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
        table.add_row(_sign(check), Text(check.name), _words(check))
    console.print(Text(visible(title), style="bold"))
    console.print(table)


def _sign(check: Check) -> Text:
    return Text(f"{SYMBOLS[check.grade]} {check.grade.value}", style=STYLES[check.grade])


def _words(check: Check) -> Text:
    text = Text(visible(check.reason))
    if check.fix:
        text.append(f"\n-> {visible(check.fix)}", style="bold")
    return text


def _sum_up(reports: list[Report]) -> None:
    counts = (f"{sum(report.count(grade) for report in reports)} {grade.value}" for grade in Grade)
    stores = f"{len(reports)} stores: " if len(reports) > 1 else ""
    note(f"{stores}{', '.join(counts)}")
