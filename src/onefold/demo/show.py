"""Print the demo: for a terminal, for a pipe, for a program. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onefold.demo.scenes import CRASH, ONCE, Report, Told
from onefold.demo.stage import Event

COLUMNS: Final = ("place", "deliveries", "effects without", "effects with", "verdict")
BALANCES: Final = ("account", "right", "without", "with")

# The events that a person looks for in a timeline.
STYLES: Final = {"killed": "bold red", "effect": "yellow", "absorbed": "green", "again": "cyan", "returned": "cyan"}


def facts(report: Report, mode: str, seconds: float) -> dict[str, object]:
    """Return the report as JSON."""
    return {
        "holds": report.holds,
        "mode": mode,
        "seconds": round(seconds, 3),
        "places": [
            {
                "place": point.number,
                "name": point.name,
                "key": point.message.key,
                "without": _counts(report.without, point.message.key),
                "with": _counts(report.guarded, point.message.key),
                "verdict": report.verdict(point),
            }
            for point in report.points
        ],
        "crash": {"without": _timed(report.without.crash), "with": _timed(report.guarded.crash)},
        "balances": {
            "right": report.right_balances,
            "without": report.without.counted.balances,
            "with": report.guarded.counted.balances,
        },
    }


def _counts(told: Told, key: str) -> dict[str, int]:
    return {"deliveries": told.counted.deliveries.get(key, 0), "effects": told.counted.effects.get(key, 0)}


def _timed(events: Sequence[Event]) -> list[dict[str, object]]:
    return [
        {"at": round(after, 3), "who": event.who, "pid": event.pid, "what": event.text}
        for after, event in _shown(events)
    ]


def _shown(events: Sequence[Event]) -> Iterator[tuple[float, Event]]:
    """Yield the events that are worth showing, each with its time."""
    shown = [event for event in events if event.kind not in ("ready", "doomed", "end")]
    return ((event.at - shown[0].at, event) for event in shown)


def on_pipe(report: Report, mode: str, seconds: float) -> None:
    """Print plain text in columns."""
    _columns([COLUMNS, *_rows(report)], right=(1, 2, 3))
    for title, told in _crashes(report):
        typer.echo(f"\n{title}")
        _columns([_moment(*each) for each in _shown(told.crash)], right=(0,))
    typer.echo("\nThe wallet")
    _columns([BALANCES, *_balances(report)], right=(1, 2, 3))
    typer.echo(f"\n{_conclusion(report, mode, seconds)}")


def _columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo("  ".join(cells).rstrip())


def on_terminal(report: Report, mode: str, seconds: float) -> None:
    """Print tables, with colour."""
    console = Console(highlight=False)
    table = _table(COLUMNS, "The double charge, demonstrated")
    for row in _rows(report):
        table.add_row(*row[:2], Text(row[2], "red"), _judged(row[3], "1"), _judged(row[4], ONCE))
    console.print(table)
    for title, told in _crashes(report):
        line = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
        line.add_column(justify="right", style="dim", no_wrap=True)
        for after, event in _shown(told.crash):
            line.add_row(*_moment(after, event), style=STYLES.get(event.kind, ""))
        console.print(line, "")
    wallet = _table(BALANCES, "The wallet")
    for row in _balances(report):
        wallet.add_row(row[0], row[1], Text(row[2], "red"), _judged(row[3], row[1]))
    console.print(wallet)
    console.print(_conclusion(report, mode, seconds), style="green" if report.holds else "bold red")


def _table(columns: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in (1, 2, 3) else "left")
    return table


def _judged(found: str, right: str) -> Text:
    return Text(found, "green" if found == right else "bold red")


def _rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for point in report.points:
        before, after = (_counts(told, point.message.key) for told in (report.without, report.guarded))
        deliveries = " and ".join(dict.fromkeys(str(counts["deliveries"]) for counts in (before, after)))
        effects = (str(before["effects"]), str(after["effects"]))
        rows.append((f"{point.number} {point.name}", deliveries, *effects, report.verdict(point)))
    return rows


def _crashes(report: Report) -> list[tuple[str, Told]]:
    title = f"The crash of place {CRASH.number}, {CRASH.message},"
    told = ((f"{title} without a guard", report.without), (f"{title} with a guard", report.guarded))
    return [(title, side) for title, side in told if side.crash]


def _moment(after: float, event: Event) -> tuple[str, str, str]:
    who = event.who if event.who == "demo" else f"{event.who} {event.pid}"
    return f"{after:.3f} s", who, event.text


def _balances(report: Report) -> list[tuple[str, ...]]:
    without, guarded = report.without.counted.balances, report.guarded.counted.balances
    return [
        (account, str(right), str(without.get(account, 0)), str(guarded.get(account, 0)))
        for account, right in report.right_balances.items()
    ]


def _conclusion(report: Report, mode: str, seconds: float) -> str:
    said = f"({mode} mode, {seconds:.1f} s)"
    if report.holds:
        return f"{len(report.points)} places, a duplicate at each: with the guard every effect happened once {said}"
    if any(report.verdict(point) != ONCE for point in report.points):
        return f"BROKEN: see the verdicts {said}"
    return f"BROKEN: the balances with the guard are wrong {said}"
