"""`onefold trace`: find the hop that replaced a key, and the producer that sent keys again, from the hops' logs."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from onefold.cli._common.output import WRONG_USAGE, Format, FormatOption, Listing, Refusal, counting, note, print_json
from onefold.health.report import counted
from onefold.trace.leaks import LeakKind
from onefold.trace.lines import STANDARD_INPUT
from onefold.trace.picture import picture
from onefold.trace.report import EVERY, Cell, Report, examine

LEAKS: Final = 1

# How many rows are printed at a time, under one heading on a terminal.
BATCH: Final = 100

COLUMNS: Final = ("hour", "hop", "lines", "keys", "sent", *(kind.value for kind in EVERY))

# Possible problems of a log. An exit status of 1 means leaks, so none of these may end in that.
UNREADABLE: Final = (OSError, EOFError, zlib.error, sqlite3.Error)


def trace(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Logs of JSON lines ('-': standard input; .gz).")],
    order: Annotated[
        str,
        typer.Option(
            "--order", show_default=False, help="The hops in the order in which messages pass them: app,gateway,worker."
        ),
    ] = "",
    check: Annotated[
        list[LeakKind] | None,
        typer.Option("--check", show_default=False, help="Only this kind of leak. May be repeated."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", show_default=False, help="Write a picture (SVG) to this file.")
    ] = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Find where keys leak: hops that replace them, and producers that create new ones or send them again.

    Exits with 0 if nothing leaks, with 1 if something does, with 2 if the logs cannot be read.
    """
    hops = [hop.strip() for hop in order.split(",") if hop.strip()]
    # A log that is named twice would look as if everything had been sent twice.
    logs = list(dict.fromkeys(logs))
    try:
        if svg is not None:
            _check_folder(svg)
        with _progress(logs) as progress:
            report = examine(logs, order=hops, checks=check or EVERY, progress=progress)
    except UNREADABLE as error:
        raise Refusal(f"{_what(error, logs)}. Nothing was examined", WRONG_USAGE) from error
    _print(report, format)
    if svg is not None:
        _draw(report, svg)
    raise typer.Exit(0 if report.clean else LEAKS)


def _check_folder(svg: Path) -> None:
    """Raise `OSError` if no picture can be drawn, before an hour is spent on reading."""
    if svg.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(svg))
    if not svg.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(svg))


def _draw(report: Report, svg: Path) -> None:
    try:
        svg.write_text(picture(report), encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{_what(error, [str(svg)])}. The picture was not drawn", WRONG_USAGE) from error


def _what(error: BaseException, logs: Sequence[str]) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, sqlite3.Error):
        return f"sorting in {tempfile.gettempdir()} failed: {error}. It needs twice the space of the logs; set TMPDIR"
    return f"{', '.join(logs)}: {str(error) or type(error).__name__}"


def _print(report: Report, format_: Format) -> None:
    if format_ is Format.JSON:
        print_json(facts(report))
    else:
        table = Listing(COLUMNS)
        for start in range(0, len(report.cells), BATCH):
            table.add([_row(cell, report) for cell in report.cells[start : start + BATCH]])
    for line in said(report):
        note(line)


def _row(cell: Cell, report: Report) -> list[str]:
    leaks = [str(cell.leaks(kind)) if kind.value in report.checks else "" for kind in EVERY]
    return [_clock(cell.hour), cell.hop, str(cell.lines), str(cell.keys), str(cell.sent), *leaks]


def said(report: Report) -> Iterator[str]:
    """Yield the report in sentences, each with an example."""
    tally, first = report.tally, report.tally.first
    if first is not None:
        yield (
            f"{counted(tally.broken, 'broken line')} left out, the first is line {first.number} of {first.file}: "
            f"{first.why}"
        )
    for hop, count in tally.not_digests.items():
        yield (
            f"{hop} wrote {counted(count, 'key')} that {'is' if count == 1 else 'are'} not a digest: it has to log "
            "onefold.trace.digest(key), never the key itself"
        )
    if tally.others:
        yield f"{counted(tally.others, 'line')} about something else left out"
    if report.crowded:
        yield f"{report.crowded[0]} has too many keys to be the id of one message; only some of them were examined"
    for hop in report.hops:
        yield from _said_of(report, hop)
    if report.clean:
        yield f"{counted(tally.lines, 'line')} from {counted(len(report.hops), 'hop')}, and no key leaks"


def _said_of(report: Report, hop: str) -> Iterator[str]:
    counts = {kind: report.count(kind, hop) for kind in EVERY}
    cells = [cell for cell in report.cells if cell.hop == hop]
    if counts[LeakKind.REPLACED]:
        such_as = _such_as(report, LeakKind.REPLACED, hop, "id")
        yield f"{hop} replaced {counted(counts[LeakKind.REPLACED], 'key')}{such_as}"
    if counts[LeakKind.REQUESTS]:
        example = _such_as(report, LeakKind.REQUESTS, hop, "key")
        yield f"{hop} gave {counted(counts[LeakKind.REQUESTS], 'key')} more than one request id{example}"
    if counts[LeakKind.RESENT]:
        restarted = sum(cell.restarted for cell in cells)
        sent = sum(cell.sent for cell in cells)
        yield (
            f"{hop} sent {counted(sent, 'time')}, with {counted(sent - counts[LeakKind.RESENT], 'distinct key')}: "
            f"{counts[LeakKind.RESENT]:,} sent again, {restarted:,} of them by another instance, as after a restart"
            f"{_such_as(report, LeakKind.RESENT, hop, 'key')}"
        )
    if counts[LeakKind.REMINTED]:
        example = _such_as(report, LeakKind.REMINTED, hop, "id")
        yield f"{hop} minted {counted(counts[LeakKind.REMINTED], 'new key')} for messages that had one{example}"


def _such_as(report: Report, kind: LeakKind, hop: str, name: str) -> str:
    example = next((one for one in report.examples.get(kind.value, ()) if one["hop"] == hop), None)
    if example is None:
        return ""
    keys = f" ({example['had']} became {example['has']})" if "had" in example else ""
    return f", such as {'message' if name == 'id' else 'key'} {example[name]}{keys}"


def facts(report: Report) -> dict[str, Any]:
    """Return the report for programs."""
    tally = report.tally
    first = (
        None if tally.first is None else {"file": tally.first.file, "line": tally.first.number, "why": tally.first.why}
    )
    return {
        "clean": report.clean,
        "lines": tally.lines,
        "broken": {"count": tally.broken, "first": first, "not_digests": tally.not_digests},
        "others": tally.others,
        "blank": tally.blank,
        "crowded": report.crowded,
        "hops": report.hops,
        "hours": [_hour(cell) for cell in report.cells],
        "leaks": {
            kind: {"count": report.count(LeakKind(kind)), "examples": [_timed(one) for one in shown]}
            for kind, shown in report.examples.items()
        },
    }


def _hour(cell: Cell) -> dict[str, Any]:
    counts = {name: getattr(cell, name) for name in ("lines", "keys", "sent", "sent_keys", "restarted")}
    return {"hour": _iso(cell.hour), "hop": cell.hop, **counts, **{kind.value: cell.leaks(kind) for kind in EVERY}}


def _timed(example: dict[str, Any]) -> dict[str, Any]:
    return {name: _iso(value) if name in ("ts", "hour") else value for name, value in example.items()}


def _iso(second: float) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat().replace("+00:00", "Z")


def _clock(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M")


@contextlib.contextmanager
def _progress(logs: Sequence[str]) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error over the bytes of all files; standard input has no known end."""
    if STANDARD_INPUT in logs:
        with counting("reading", "bytes of files"):
            yield lambda _count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        total = sum(os.stat(log).st_size for log in logs)
        task = progress.add_task("reading", total=total)
        labels = ("reading", "comparing")
        yield lambda count: progress.update(task, completed=count, description=labels[count >= total])
