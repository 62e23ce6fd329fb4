"""`onefold top`: show running and held records, refreshing. It changes nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onefold import Record, State
from onefold.cli._common.durations import pause_of
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    Format,
    FormatOption,
    Listing,
    OperationOption,
    ScopeOption,
    about,
    block,
    fits,
    note,
    on_terminal,
    visible,
)
from onefold.cli._common.store_option import StoreOption, display_url, the_store
from onefold.maintenance.pages import records
from onefold.stores.base import Browsable, Query

INTERVAL: Final = "2s"

# How many of each kind are read: some megabytes. If there are more, the numbers cover only those read.
LOOK_MAX: Final = 20_000

# Operations are named by hand, a few dozen at most.
LINES_MAX: Final = 1_000

COLUMNS: Final = ("operation", "running", "next lease ends in", "abandoned", "longest", "held", "starts/s", "ends/s")


class Line(msgspec.Struct):
    """One operation at one refresh."""

    # The running ones: each claim has its own token.
    tokens: set[bytes]
    abandoned: int = 0
    held: int = 0
    lease_left: float = math.inf
    longest: float = 0.0
    # None: there was no refresh before, or it did not see all.
    starts: float | None = None
    ends: float | None = None

    @property
    def running(self) -> int:
        return len(self.tokens)

    def add(self, record: Record) -> None:
        if record.state is State.HELD:
            self.held += 1
        elif record.is_abandoned:
            self.abandoned += 1
        else:
            self.tokens.add(record.token)
            self.lease_left = min(self.lease_left, record.lease_left)
            self.longest = max(self.longest, record.age)


class Look(msgspec.Struct):
    """The result of one refresh."""

    at: float
    lines: dict[str, Line]
    # Whether there were more records than are read.
    partial: bool = False
    # The time, for people.
    time: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))


def top(
    scope: ScopeOption = None,
    operation: OperationOption = None,
    interval: Annotated[str, typer.Option("--interval", help="How long to wait between two refreshes.")] = INTERVAL,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and exit.")] = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Show what is running and what is held, by operation, until Ctrl-C.

    Starts and ends are those that were seen between two refreshes: what begins and ends in between is not seen. A
    refresh reads the whole store, and it pauses for at least as long as that took.
    """
    pause = pause_of(interval, "--interval")
    url = the_store(store)
    with opened(url) as guard:
        query = Query(scope=scope, operation=operation)
        if once:
            _print(look(guard.store, query), format)
            return
        try:
            if on_terminal() and format is Format.TABLE:
                _live(guard.store, query, pause, display_url(url))
            else:
                for seen in looks(guard.store, query, pause):
                    _print(seen, format)
        except KeyboardInterrupt:
            # This is how to leave.
            return


def looks(store: Browsable, query: Query, pause: float) -> Iterator[Look]:
    """Yield one refresh after another, with the changes since the previous one. Use at most half of the time."""
    before: Look | None = None
    while True:
        began = time.monotonic()
        seen = look(store, query, before)
        yield seen
        before = seen
        time.sleep(max(pause, seen.at - began))


def look(store: Browsable, query: Query, before: Look | None = None) -> Look:
    lines: dict[str, Line] = {}
    partial = False
    for state in (State.RUNNING, State.HELD):
        found = records(store, query._replace(state=state))
        for record in islice(found, LOOK_MAX):
            lines.setdefault(record.address.operation, Line(set())).add(record)
        partial = partial or next(found, None) is not None
    seen = Look(time.monotonic(), dict(sorted(lines.items())), partial)
    if before is not None and not partial and not before.partial:
        _compare(before, seen)
    return seen


def _compare(before: Look, seen: Look) -> None:
    took = max(seen.at - before.at, 0.001)
    # An operation that was seen once stays in view: lines that come and go cannot be read.
    gone = sorted(before.lines.keys() - seen.lines.keys())[: max(LINES_MAX - len(seen.lines), 0)]
    seen.lines = dict(sorted((seen.lines | {operation: Line(set()) for operation in gone}).items()))
    for operation, line in seen.lines.items():
        earlier = before.lines.get(operation, Line(set())).tokens
        line.starts = len(line.tokens - earlier) / took
        line.ends = len(earlier - line.tokens) / took


def _live(store: Browsable, query: Query, pause: float, where: str) -> None:
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for seen in looks(store, query, pause):
            live.update(_picture(seen, where, console.width), refresh=True)


def _picture(seen: Look, where: str, width: int) -> Group:
    title = Text(f"{visible(where)}  {time.strftime('%H:%M:%S')}  Ctrl-C to quit", style="bold")
    cells = [[visible(cell) for cell in row] for row in rows(seen)]
    if not cells:
        return Group(title, Text("nothing is running, and nothing is held"))
    if not fits(COLUMNS, cells, width):
        return Group(title, *(line for row in cells for line in (Text(), *block(COLUMNS, row))))
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return Group(title, table)


def _print(seen: Look, format_: Format) -> None:
    if format_ is Format.JSON:
        # One line per refresh.
        typer.echo(json.dumps(document(seen), allow_nan=False))
        return
    Listing(COLUMNS).add([*rows(seen)])
    if not seen.lines:
        note("nothing is running, and nothing is held")
    if seen.partial:
        note(f"there are too many: only the first {LOOK_MAX:,} of each kind are counted")


def rows(seen: Look) -> Iterator[tuple[str, ...]]:
    for operation, line in seen.lines.items():
        yield (
            operation,
            str(line.running),
            about(line.lease_left) if line.running else "",
            str(line.abandoned),
            about(line.longest) if line.running else "",
            str(line.held),
            "" if line.starts is None else f"{line.starts:.1f}",
            "" if line.ends is None else f"{line.ends:.1f}",
        )


def document(seen: Look) -> dict[str, Any]:
    """Return the document for programs. Durations are seconds."""
    return {
        "time": seen.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "partial": seen.partial,
        "operations": [
            {
                "operation": operation,
                "running": line.running,
                "lease_left": round(line.lease_left, 3) if line.running else None,
                "abandoned": line.abandoned,
                "longest": round(line.longest, 3) if line.running else None,
                "held": line.held,
                "starts": None if line.starts is None else round(line.starts, 3),
                "ends": None if line.ends is None else round(line.ends, 3),
            }
            for operation, line in seen.lines.items()
        ],
    }
