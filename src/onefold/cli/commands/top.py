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
from onefold.cli._common.samples import SAMPLE_MAX, ExactOption, is_in_doubt
from onefold.cli._common.store_option import StoreOption, display_url, the_store
from onefold.maintenance.pages import records
from onefold.stores.base import Browsable, Indexed, Query, Sample, Sampling

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
    # How many records each of those that were read stands for.
    weight: float = 1.0

    @property
    def running(self) -> int:
        return round(len(self.tokens) * self.weight)

    def add(self, record: Record, weight: float = 1.0) -> None:
        self.weight = weight
        if record.state is State.HELD:
            self.held += round(weight)
        elif record.is_abandoned:
            self.abandoned += round(weight)
        else:
            self.tokens.add(record.token)
            self.lease_left = min(self.lease_left, record.lease_left)
            self.longest = max(self.longest, record.age)


class Look(msgspec.Struct):
    """The result of one refresh."""

    at: float
    lines: dict[str, Line]
    # Whether there were more records than are read: some of those that run or are held are not counted.
    partial: bool = False
    # Whether some were counted for others, or running ones that expire may be missing among millions.
    estimated: bool = False
    # The time, for people.
    time: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))

    def add(self, record: Record, weight: float = 1.0) -> None:
        self.lines.setdefault(record.address.operation, Line(set())).add(record, weight)


def top(
    scope: ScopeOption = None,
    operation: OperationOption = None,
    interval: Annotated[str, typer.Option("--interval", help="How long to wait between two refreshes.")] = INTERVAL,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and exit.")] = False,
    exact: ExactOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Show what is running and what is held, by operation, until Ctrl-C.

    Starts and ends are those that were seen between two refreshes: what begins and ends in between is not seen. A
    refresh of a large store reads a part of it, and says so; with --exact it reads the whole store. It pauses for at
    least as long as that took.
    """
    pause = pause_of(interval, "--interval")
    url = the_store(store)
    with opened(url) as guard:
        query = Query(scope=scope, operation=operation)
        if once:
            _print(look(guard.store, query, exact=exact), format)
            return
        try:
            if on_terminal() and format is Format.TABLE:
                _live(guard.store, query, pause, display_url(url), exact=exact)
            else:
                for seen in looks(guard.store, query, pause, exact=exact):
                    _print(seen, format)
        except KeyboardInterrupt:
            # This is how to leave.
            return


def looks(store: Browsable, query: Query, pause: float, *, exact: bool = False) -> Iterator[Look]:
    """Yield one refresh after another, with the changes since the previous one. Use at most half of the time."""
    before: Look | None = None
    while True:
        began = time.monotonic()
        seen = look(store, query, before, exact=exact)
        yield seen
        before = seen
        time.sleep(max(pause, seen.at - began))


def look(store: Browsable, query: Query, before: Look | None = None, *, exact: bool = False) -> Look:
    """Return what runs and what is held, with the changes since the look before."""
    seen = Look(0.0, {})
    if exact or not isinstance(store, Sampling):
        _read_all(store, query, seen)
    elif isinstance(store, Indexed):
        _read_index(store, query, seen)
    else:
        _read_sample(store, query, seen)
    seen.lines = dict(sorted(seen.lines.items()))
    seen.at = time.monotonic()
    if before is not None and not seen.partial and not before.partial:
        _compare(before, seen)
    return seen


def _read_all(store: Browsable, query: Query, seen: Look) -> None:
    for state in (State.RUNNING, State.HELD):
        found = records(store, query._replace(state=state))
        for record in islice(found, LOOK_MAX):
            seen.add(record)
        seen.partial = seen.partial or next(found, None) is not None


def _read_index(store: Indexed, query: Query, seen: Look) -> None:
    """Read what an index has first: all that is held, and all that runs and never expires."""
    found = store.unsettled(LOOK_MAX + 1)
    for record in Sample.of(((one, 1.0) for one in found[:LOOK_MAX]), query, complete=True).records:
        if record.state in (State.RUNNING, State.HELD):
            seen.add(record)
    seen.estimated = len(found) > LOOK_MAX
    seen.partial = seen.estimated and is_in_doubt(found[-1])


def _read_sample(store: Sampling, query: Query, seen: Look) -> None:
    sample = store.sample(query, SAMPLE_MAX)
    for record, weight in zip(sample.records, sample.weights, strict=True):
        if record.state in (State.RUNNING, State.HELD):
            seen.add(record, weight)
    # Starts and ends cannot be told from a sample.
    seen.estimated = seen.partial = not sample.complete


def _compare(before: Look, seen: Look) -> None:
    took = max(seen.at - before.at, 0.001)
    # An operation that was seen once stays in view: lines that come and go cannot be read.
    gone = sorted(before.lines.keys() - seen.lines.keys())[: max(LINES_MAX - len(seen.lines), 0)]
    seen.lines = dict(sorted((seen.lines | {operation: Line(set()) for operation in gone}).items()))
    for operation, line in seen.lines.items():
        earlier = before.lines.get(operation, Line(set())).tokens
        line.starts = len(line.tokens - earlier) / took
        line.ends = len(earlier - line.tokens) / took


def _live(store: Browsable, query: Query, pause: float, where: str, *, exact: bool) -> None:
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for seen in looks(store, query, pause, exact=exact):
            live.update(_picture(seen, where, console.width), refresh=True)


def _picture(seen: Look, where: str, width: int) -> Group:
    title = Text(f"{visible(where)}  {time.strftime('%H:%M:%S')}  Ctrl-C to quit", style="bold")
    cells = [[visible(cell) for cell in row] for row in rows(seen)]
    if not cells:
        return Group(title, Text("nothing is running, and nothing is held"))
    if not fits(COLUMNS, cells, width):
        return Group(title, *(line for row in cells for line in (Text(), *block(COLUMNS, row))))
    table = Table(box=None, pad_edge=False)
    below = [Text(warning(seen), style="dim")] if seen.estimated else []
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return Group(title, table, *below)


def _print(seen: Look, format_: Format) -> None:
    if format_ is Format.JSON:
        # One line per refresh.
        typer.echo(json.dumps(document(seen), allow_nan=False))
        return
    Listing(COLUMNS).add([*rows(seen)])
    if not seen.lines:
        note("nothing is running, and nothing is held")
    if seen.estimated:
        note(warning(seen))
    elif seen.partial:
        note(f"there are too many: only the first {LOOK_MAX:,} of each kind are counted")


def warning(seen: Look) -> str:
    """Return what the numbers of a part of the store leave out."""
    if seen.partial:
        return "estimated from a part of the store, in which what is rare may be missing. For all: --exact"
    return "what is held is counted; running records that expire may be missing in so large a store. For all: --exact"


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
        "estimated": seen.estimated,
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
