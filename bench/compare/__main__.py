"""`make bench`: Onefold, the raw drivers and the other libraries, on the same servers in alternating rounds.

What cannot be installed or started is a row that says so. Nothing is asserted about times: the bars are printed with
their verdicts. `--save` writes docs/benchmarks/: results.json, and the page and the charts that are made from it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import resource
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

import onefold
from bench.compare import bars, charts, page, sizes, tables
from bench.compare.contests import CONTESTS
from bench.compare.machine import load, machine, server_versions
from bench.compare.run import Asked, run
from services.house import House

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
RESULTS: Final = "results.json"
# What `make bench-scale` leaves there.
SCALE: Final = "scale.json"
GROWTH: Final = ("store", "records", "claim_us", "ratio")

# Of a contest of weight 1: with the throughput and the starts of the servers, all of them take about five minutes.
SECONDS: Final = 12.0
QUICK: Final = Asked(seconds=2.0, throughput=0.3)
QUICK_RECORDS: Final = 2_000


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    _prepare()
    results = measure(asked)
    if asked.save:
        save(results, asked.folder)
    if asked.format == "json":
        print(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        tables.show(results, Console())
    return 0


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    names = [contest.name for contest in CONTESTS]
    parser.add_argument("--only", action="append", choices=[*names, "sizes"], metavar="CONTEST", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for a contest (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="at most so many rounds for each contest")
    parser.add_argument("--quick", action="store_true", help="a short run, to see that all of them work")
    parser.add_argument("--no-throughput", action="store_true", help="only one caller at a time")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--save", action="store_true", help="write the results, the page and the charts")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.save and asked.folder == FOLDER and (asked.only or asked.quick or asked.no_throughput):
        parser.error("--save takes a whole run: the page shows every contest, and a short run shows noise")
    return asked


def _prepare() -> None:
    """A thousand tasks of a library without a limit open a thousand connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # That a test server forgets everything is meant; what the others have to say goes into nobody's time.
    logging.getLogger("onefold").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def measure(asked: Any) -> dict[str, Any]:
    how = QUICK if asked.quick else Asked(asked.seconds)
    how = how._replace(rounds=asked.rounds, throughput=0.0 if asked.no_throughput else how.throughput)
    wanted = [contest for contest in CONTESTS if not asked.only or contest.name in asked.only]
    with_sizes = not asked.only or "sizes" in asked.only
    results: dict[str, Any] = {
        "format": 1,
        "onefold": onefold.__version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "load_before": load(),
        "seconds": how.seconds,
        "contests": [],
        "sizes": [],
    }
    with closing(House()) as house, _progress() as progress:
        task = progress.add_task("", total=len(wanted) + with_sizes)
        for contest in wanted:
            _tell(progress, task, contest.title)
            results["contests"].append(run(contest, house, how))
            progress.advance(task)
        if with_sizes:
            _tell(progress, task, "bytes of a record")
            results["sizes"] = sizes.measure(house, QUICK_RECORDS if asked.quick else sizes.RECORDS)
        results["servers"] = server_versions(house) if not asked.only else {}
    results["growth"] = growth(asked.folder)
    results["load_after"] = load()
    results["bars"] = bars.judge(results)
    return results


def growth(folder: Path) -> list[dict[str, Any]]:
    """Return what `make bench-scale` measured last, if it did."""
    try:
        found = json.loads((folder / SCALE).read_text(encoding="utf-8")).get("growth", [])
    except FileNotFoundError:
        return []
    return [{name: one[name] for name in GROWTH if name in one} for one in found]


def save(results: dict[str, Any], folder: Path) -> None:
    """Write the results, and what is made from them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {RESULTS: json.dumps(results, indent=2, ensure_ascii=False) + "\n", "index.md": page.page(results)}
    written |= charts.charts(results)
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    # A contest that was drawn last time and could not be measured now.
    for contest in CONTESTS:
        if f"{contest.name}.svg" not in written:
            (folder / f"{contest.name}.svg").unlink(missing_ok=True)


def _tell(progress: Progress, task: TaskID, words: str) -> None:
    """Say what is measured now: in the line that moves, or in a log, which has no such line, in one of its own."""
    progress.update(task, description=words)
    if not progress.console.is_terminal:
        one = progress.tasks[task]
        print(f"{one.completed + 1:.0f}/{one.total:.0f} {words}", file=sys.stderr, flush=True)


def _progress() -> Progress:
    """On the other stream: what is printed at the end can be piped."""
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    sys.exit(main())
