"""The results in a terminal."""

from __future__ import annotations

from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.compare.bars import MET, MISSED
from bench.compare.contests import ENGINE, OURS
from bench.compare.throughput import callers_of
from bench.compare.wording import duration, figure, ratio, speed

STYLES: Final = {MET: "green", MISSED: "red"}
CAPTION: Final = (
    "The sides take turns. Onefold ÷ it: how many times longer Onefold takes, median of blocks "
    "(quartiles); below 1, Onefold is the faster. Read the ratios: the times are this machine's."
)


def show(results: dict[str, Any], console: Console) -> None:
    for contest in results["contests"]:
        if contest["sides"]:
            console.print(_latency(contest))
        if contest["throughput"]:
            console.print(_throughput(contest))
        for one in contest["missing"]:
            _say(console, f"{contest['title']}: {one['name']} is missing: {one['why']}", "yellow")
        if contest["note"]:
            _say(console, contest["note"], "dim")
    for one in results["sizes"]:
        found = f"{one['bytes']:g} bytes" if "bytes" in one else f"not measured: {one['missing']}"
        _say(console, f"{one['store']}, {one['keys']} keys: a finished record without a result takes {found}", "")
    console.print(_bars(results))
    _say(console, CAPTION, "dim")


def _say(console: Console, words: str, style: str) -> None:
    console.print(words, style=style, highlight=False, markup=False)


def _latency(contest: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE, title=contest["title"], title_justify="left", pad_edge=False)
    table.add_column("side", no_wrap=True)
    for call in ("first", "duplicate"):
        for name in (f"{call} p50", "p99", "Onefold ÷ it"):
            table.add_column(name, justify="right", no_wrap=True)
    for side in contest["sides"]:
        cells = []
        for call in ("first", "duplicate"):
            found = side[call]
            compared = "" if side["role"] == OURS else ratio(found["ratio"])
            cells += [duration(found["p50_us"]), duration(found["p99_us"]), compared]
        table.add_row(_name(side), *cells, style="bold" if side["role"] == OURS else "")
    return table


def _name(side: dict[str, Any]) -> str:
    return f"{side['name']} (engine)" if side["role"] == ENGINE else str(side["name"])


def _throughput(contest: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE, title=f"{contest['title']}: first calls a second", title_justify="left", pad_edge=False)
    table.add_column("side", no_wrap=True)
    for course in contest["throughput"]:
        table.add_column(callers_of(contest["kind"], course["callers"]), justify="right", no_wrap=True)
        table.add_column("Onefold ÷ it", justify="right", no_wrap=True)
    for row in throughput_rows(contest):
        table.add_row(*row)
    return table


def throughput_rows(contest: dict[str, Any]) -> list[list[str]]:
    """Return a row for each side: its speed and the ratio, for each number of callers."""
    rows = []
    for index, side in enumerate(contest["sides"]):
        row = [str(side["name"])]
        for course in contest["throughput"]:
            one = course["sides"][index]
            if "missing" in one:
                row += ["failed", ""]
            else:
                row += [
                    speed(one["per_second"]),
                    "" if one["role"] == OURS or not one["ratio"] else ratio(one["ratio"]),
                ]
        rows.append(row)
    return rows


def _bars(results: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE, title="The bars", title_justify="left", pad_edge=False)
    for name in ("work", "must be", "found", "", "by"):
        table.add_column(name)
    for bar in results["bars"]:
        verdict = Text(bar["verdict"], STYLES.get(bar["verdict"], "yellow"))
        table.add_row(bar["work"], bar["must"], figure(bar), verdict, bar.get("by", ""))
    return table
