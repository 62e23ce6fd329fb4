"""`make bench-quick`: what a guard costs on each store, against the same work by hand, in under a minute.

A store whose server or driver is missing is a row that says so. Nothing is asserted: a machine that is busy with
something else is no failure. `--format json` is for tools. `make bench` is the whole comparison, with other libraries.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench.measure import Compared, Measured, measure
from bench.pairs import PAIRS
from onefold import OnefoldError
from services.house import House
from services.processes import ServerFailed
from services.programs import Missing

# Nine of these, and the starts of the servers, stay below a minute.
SECONDS: Final = 3.0


class Row(NamedTuple):
    """One store: what was measured, or why nothing was."""

    store: str
    ours: str = ""
    by_hand: str = ""
    measured: Measured | None = None
    missing: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    stores = asked.only or [*PAIRS]
    with closing(House()) as house, _progress() as progress:
        task = progress.add_task("", total=len(stores))
        rows = []
        for store in stores:
            progress.update(task, description=store)
            rows.append(_row(store, house, asked))
            progress.advance(task)
    if asked.format == "json":
        print(json.dumps({"python": platform.python_version(), "rows": [_as_json(row) for row in rows]}, indent=2))
    else:
        _show(rows)
    return 0


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m bench.quick", description=__doc__)
    parser.add_argument("--only", action="append", choices=[*PAIRS], metavar="STORE", help=", ".join(PAIRS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each store (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="at most so many rounds for each store")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser.parse_args(arguments)


def _progress() -> Progress:
    """On the other stream: what is printed at the end can be piped."""
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _row(store: str, house: House, asked: Any) -> Row:
    try:
        with PAIRS[store](house) as pair:
            measured = measure(pair, seconds=asked.seconds, rounds=asked.rounds)
            return Row(store, pair.ours.title, pair.by_hand.title, measured)
    except (Missing, ServerFailed, OnefoldError, ImportError) as error:
        return Row(store, missing=str(error).splitlines()[0])


def _show(rows: Sequence[Row]) -> None:
    caption = "p50 of one call; the two sides take turns. Read the ratios: the times are this machine's."
    table = Table(box=SIMPLE, caption=caption, caption_justify="left", pad_edge=False)
    table.add_column("store, and by hand")
    table.add_column("call")
    for name in ("onefold", "by hand", "ratio", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    missing = []
    for row in rows:
        if row.measured is None:
            missing.append(row)
            continue
        table.add_row(row.store, "first", *_cells(row.measured.first))
        by_hand = Text(row.by_hand, "dim")
        table.add_row(by_hand, "duplicate", *_cells(row.measured.duplicate), end_section=True)
    console = Console()
    console.print(table)
    for row in missing:
        console.print(f"{row.store}: not measured: {row.missing}", style="yellow", highlight=False, markup=False)


def _cells(found: Compared) -> tuple[str | Text, ...]:
    at_most = "" if found.at_most is None else f"{found.at_most:.2f}"
    verdicts = {None: Text(""), True: Text("met", "green"), False: Text("missed", "red")}
    return _in_words(found.ours), _in_words(found.by_hand), f"{found.ratio:.2f}", at_most, verdicts[found.met]


def _in_words(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _as_json(row: Row) -> dict[str, Any]:
    if row.measured is None:
        return {"store": row.store, "missing": row.missing}
    calls = {"first": row.measured.first, "duplicate": row.measured.duplicate}
    return {
        "store": row.store,
        "ours": row.ours,
        "by_hand": row.by_hand,
        "rounds": row.measured.rounds,
        **{
            call: {
                "ours_us": round(found.ours * 1e6, 2),
                "by_hand_us": round(found.by_hand * 1e6, 2),
                "ratio": round(found.ratio, 3),
                "at_most": found.at_most,
                "met": found.met,
            }
            for call, found in calls.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
