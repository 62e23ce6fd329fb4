"""The command: a sample of breaks by a seed, the tests of each, and the ones that nobody noticed.

A survivor is a promise without a test that can fail, or a change that changes nothing: read it, and mend or explain it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.mutate.breaks import Break, breaks
from bench.mutate.runner import PROJECT, Copy, Red, Verdict, copied
from bench.mutate.suites import suite

SOURCES: Final = Path("src/onefold")
COUNT: Final = 50
# The slowest suite takes some three minutes on two cores; what takes thrice as long waits for ever.
SECONDS_MAX: Final = 600.0


@dataclass(frozen=True)
class Trial:
    """One break in one module, and the tests that should notice it."""

    module: Path
    broken: Break
    tests: tuple[str, ...]

    @property
    def position(self) -> str:
        return f"{self.module}:{self.broken.line}"


@dataclass(frozen=True)
class Judged:
    """A trial's verdict, in plain values."""

    position: str
    old: str
    new: str
    verdict: str


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, stderr=asked.format == "json")
    trials = _sample(asked.only, asked.count, asked.seed)
    console.print(f"seed {asked.seed}: {len(trials)} breaks, one at a time")
    try:
        with copied(asked.seconds_max) as copy:
            judged = list(_judge(trials, copy, console.print))
    except Red as red:
        console.print(str(red), markup=False)
        return 2
    survivors = [trial for trial in judged if trial.verdict == Verdict.SURVIVED.value]
    if asked.format == "json":
        print(json.dumps([asdict(trial) for trial in judged], indent=2))
    console.print(f"{len(judged) - len(survivors)} of {len(judged)} were noticed; to read: {len(survivors)}")
    for survivor in survivors:
        console.print(f"  {survivor.position}: {survivor.old}  ->  {survivor.new}", markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutate", description=__doc__, epilog="Example: python -m bench.mutate --only _decide.py"
    )
    parser.add_argument("--count", type=int, default=COUNT, help=f"how many breaks (default {COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="which ones: the same seed breaks the same places")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="modules below src/onefold, such as 'stores/*'"
    )
    parser.add_argument("--seconds-max", type=float, default=SECONDS_MAX, help="when tests count as waiting for ever")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def _sample(only: Sequence[str] | None, count: int, seed: int) -> list[Trial]:
    """Choose breaks by chance; a long module is broken more often than a short one."""
    offered = list(_offered(only))
    chosen = random.Random(seed).sample(offered, min(count, len(offered)))
    # Tests of one suite one after the other: their first run without a break is shared.
    return sorted(chosen, key=lambda trial: (trial.tests, str(trial.module), trial.broken.start))


def _offered(only: Sequence[str] | None) -> Iterator[Trial]:
    for path in sorted((PROJECT / SOURCES).rglob("*.py")):
        below = path.relative_to(PROJECT / SOURCES)
        tests = suite(below.as_posix(), PROJECT / "tests")
        if tests and (not only or any(below.match(pattern) for pattern in only)):
            for broken in breaks(path.read_text(encoding="utf-8")):
                yield Trial(SOURCES / below, broken, tests)


def _judge(trials: Sequence[Trial], copy: Copy, tell: Callable[..., None]) -> Iterator[Judged]:
    green: set[tuple[str, ...]] = set()
    for number, trial in enumerate(trials, 1):
        if trial.tests not in green:
            copy.check_green(trial.tests)
            green.add(trial.tests)
        source = (PROJECT / trial.module).read_text(encoding="utf-8")
        verdict = copy.judge(trial.module, trial.broken.applied(source), trial.tests)
        tell(f"{number:>4} {verdict.value:<10} {trial.position}: {trial.broken}", markup=False)
        yield Judged(trial.position, trial.broken.old, trial.broken.new, verdict.value)


if __name__ == "__main__":
    sys.exit(main())
