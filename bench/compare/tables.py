"""The results in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.compare.bars import MET, MISSED, NOT_MEASURED
from bench.compare.contests import ENGINE, OURS
from bench.compare.throughput import callers_of
from bench.compare.wording import duration, figure, ratio, speed

STYLES: Final = {MET: "green", MISSED: "red"}
# After `--only` most bars are not measured: nobody wants to read their names.
NAMED_MAX: Final = 10
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
    if missing := [bar["work"] for bar in results["bars"] if bar["verdict"] == NOT_MEASURED]:
        names = f": {', '.join(missing)}" if len(missing) <= NAMED_MAX else ""
        _say(console, f"{len(missing)} of {len(results['bars'])} bars were not measured in this run{names}.", "yellow")
    _say(console, CAPTION, "dim")


def _say(console: Console, words: str, style: str) -> None:
    console.print(words, style=style, highlight=False, markup=False)


def _latency(contest: dict[str, Any]) -> Table:
    table = _table(contest["title"], ("side", "call"), ("p50", "p99", "Onefold ÷ it"))
    for side in contest["sides"]:
        for call in ("first", "duplicate"):
            found = side[call]
            compared = "" if side["role"] == OURS else ratio(found["ratio"])
            name = _name(side) if call == "first" else Text(side["version"], "dim")
            style = "bold" if side["role"] == OURS else ""
            table.add_row(name, call, duration(found["p50_us"]), duration(found["p99_us"]), compared, style=style)
    return table


def _table(title: str, words: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, title=title, title_justify="left", pad_edge=False)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _name(side: dict[str, Any]) -> str:
    return f"{side['name']} (engine)" if side["role"] == ENGINE else str(side["name"])


def _throughput(contest: dict[str, Any]) -> Table:
    table = _table(f"{contest['title']}: first calls a second", ("callers", "side"), ("speed", "Onefold ÷ it"))
    for course in contest["throughput"]:
        callers = callers_of(contest["kind"], course["callers"])
        for index, side in enumerate(course["sides"]):
            table.add_row("" if index else callers, side["name"], *speed_and_ratio(side))
    return table


def speed_and_ratio(side: dict[str, Any]) -> tuple[str, str]:
    """Return the cells of one side with so many callers."""
    if "missing" in side:
        return "failed", ""
    is_compared = side["role"] != OURS and side["ratio"]
    return speed(side["per_second"]), ratio(side["ratio"]) if is_compared else ""


def _bars(results: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE, title="The bars", title_justify="left", pad_edge=False)
    for name in ("work", "must be", "found", "", "by"):
        table.add_column(name)
    for bar in results["bars"]:
        if bar["verdict"] == NOT_MEASURED:
            continue
        verdict = Text(bar["verdict"], STYLES.get(bar["verdict"], "yellow"))
        table.add_row(bar["work"], bar["must"], figure(bar), verdict, bar.get("by", ""))
    return table
