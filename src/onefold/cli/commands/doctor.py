"""`onefold doctor`: report problems of a store, or of the stores and queues of a configuration, and how to fix them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
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
from onefold.cli._common.store_option import (
    StoresOption,
    Target,
    Unset,
    display_url,
    the_configurations,
    the_stores,
    without_secrets,
)
from onefold.config import Configuration
from onefold.config.declared import DeclaredGuard
from onefold.durations import as_text
from onefold.health import Check, Grade, Report, examine
from onefold.health.examine import unreachable
from onefold.health.report import counted
from onefold.lint.brokers import examine_queue
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

    Of a configuration, the queues of guards with a `broker` are examined, too. It creates no tables, and leaves no
    record behind. Exits with 0 if nothing is red, 1 if something is, 2 if a store or a broker cannot be reached or a
    configuration cannot be used.
    """
    patience = seconds_of(timeout, "--timeout")
    if patience == 0:
        raise Refusal("--timeout 0s leaves no time to answer", WRONG_USAGE)
    targets, reports = the_stores(store), list[Report]()
    queues = _queues(the_configurations(store))
    for target in targets:
        reports.append(_examined(target, patience, alone=len(targets) == 1))
        if format is Format.TABLE:
            _print(target.name, target.place, reports[-1], first=len(reports) == 1)
    for guard, broker, configuration in queues:
        reports.append(_examined_queue(guard, configuration, patience))
        if format is Format.TABLE:
            _print(f"guards.{guard.name}", broker, reports[-1], first=False)
    if format is Format.JSON:
        places = [*map(_of_store, targets), *(_of_queue(guard, broker) for guard, broker, _ in queues)]
        print_json([_document(place, report) for place, report in zip(places, reports, strict=True)])
    else:
        _sum_up(reports, stores=len(targets))
    raise typer.Exit(status(reports, strict=strict))


def _queues(configurations: list[Configuration]) -> list[tuple[DeclaredGuard, str, Configuration]]:
    """Return the guards whose broker is declared, and that broker for people."""
    return [
        (guard, display_url(guard.broker) if guard.broker else written, configuration)
        for configuration in configurations
        for guard in configuration.guards.values()
        if (written := configuration.written_broker(guard.name)) is not None
    ]


def _examined_queue(guard: DeclaredGuard, configuration: Configuration, patience: float) -> Report:
    broker = guard.broker
    if broker is None:
        return unreachable(f"a variable of {configuration.written_broker(guard.name)} is not set")
    found = _within(patience, lambda: examine_queue(guard, patience))
    checks = (check._replace(reason=without_secrets(check.reason, broker)) for check in found.checks)
    return found._replace(checks=tuple(checks))


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
        found = _within(patience, lambda: _report(url))
    except UsageError as error:
        text = without_secrets(str(error), url)
        if alone and not target.name:
            raise Refusal(text, WRONG_USAGE) from None
        return unreachable(text)
    checks = (check._replace(reason=without_secrets(check.reason, url)) for check in found.checks)
    return found._replace(checks=tuple(checks))


def _within(patience: float, examined: Callable[[], Report]) -> Report:
    """Return the report within a bounded time, whatever the server does; a thread that hangs ends with the process."""
    answers: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(examined())
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


def _of_store(target: Target) -> dict[str, object]:
    return {"name": target.name or None, "store": target.place}


def _of_queue(guard: DeclaredGuard, broker: str) -> dict[str, object]:
    return {"name": f"guards.{guard.name}", "broker": broker, "queue": guard.queue}


def _document(place: dict[str, object], report: Report) -> dict[str, object]:
    checks = [check._asdict() for check in report.checks]
    counts = {grade.value: report.count(grade) for grade in Grade}
    return place | {"reached": report.reached, **counts, "checks": checks}


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


def _sum_up(reports: list[Report], stores: int) -> None:
    counts = (f"{sum(report.count(grade) for report in reports)} {grade.value}" for grade in Grade)
    queues = len(reports) - stores
    parts = [counted(stores, "store"), *([counted(queues, "queue")] if queues else [])]
    note(f"{' and '.join(parts) + ': ' if len(reports) > 1 else ''}{', '.join(counts)}")
