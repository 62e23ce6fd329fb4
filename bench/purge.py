"""`python -m bench.purge`: what deliveries notice of a purge, on a PostgreSQL of its own.

Half of the table has expired. Two workers deliver new keys all the time: first beside nobody, then in turn beside
the loop of `onefold purge` and beside nobody again, until all is purged. Whatever else the machine does meanwhile hits
both alike, so that the ratio of their p99 can be believed where the times cannot.
Nothing is asserted: a machine that is busy with something else is no failure. `--format json` is for tools.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from onefold import Guard
from onefold.maintenance import purge as purging
from services.house import House
from services.postgres import connected

ROWS: Final = 2_000_000
SECONDS: Final = 40.0
WORKERS: Final = 2

# So often purging and not purging take turns.
ROUNDS: Final = 10

# At most so many times longer may the slowest hundredth of the deliveries take while a purge runs.
AT_MOST: Final = 2.0

# Not measured: connections are opened, statements prepared, and the server's caches filled.
WARM_UP_SECONDS: Final = 2.0

# How long a worker that was told to stop may take; it is in the middle of a delivery.
PATIENCE: Final = 120.0

# What two operations have written in a day, the day before yesterday: one keeps its records for a day, and all of them
# have expired; the other, in turn with it, keeps them for a month. Keys are random, as most are.
LOAD: Final = """
INSERT INTO onefold_records
    (scope, operation, key, state, attempt, began, changed, expires, due, remark, revision, token, fingerprint)
SELECT '', operation, gen_random_uuid()::text, 'done', 1, written, written, written + keep,
    floor((written + keep) / 600)::integer, '', 2, uuid_send(gen_random_uuid()),
    uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
FROM (
    SELECT date_part('epoch', now()) - 2 * 86400 + 86399.0 * number / {rows} AS written,
        CASE WHEN number % 2 = 0 THEN 'notify' ELSE 'charge' END AS operation,
        CASE WHEN number % 2 = 0 THEN 86400 ELSE 30 * 86400 END AS keep
    FROM generate_series(1, {rows}) AS number
) AS loaded
"""


class Phase(NamedTuple):
    """What deliveries took in one part of the measurement, in seconds each."""

    name: str
    deliveries: int
    p50: float
    p99: float
    longest: float


class Measured(NamedTuple):
    rows: int
    purged: purging.Purged
    phases: list[Phase]
    load: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Of the p99 while purging to the p99 before each part of it."""
        return self.phases[2].p99 / self.phases[1].p99


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    with closing(House()) as house, house.own("postgres") as server:
        measured = measure(server.url, asked.rows, asked.seconds, asked.batch)
    if asked.format == "json":
        print(json.dumps(as_json(measured), indent=2))
    else:
        _show(measured)
    return 0


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m bench.purge", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="half of them expired (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all, beside nobody")
    parser.add_argument("--batch", type=int, default=purging.BATCH, help="as of `onefold purge`")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser.parse_args(arguments)


def measure(url: str, rows: int, seconds: float, batch: int) -> Measured:
    """Load the table, let the workers deliver, purge, and say what the deliveries took."""
    load_before = os.getloadavg()[0]
    with closing(Guard(url)) as guard:
        guard.store.purge(1)
        _load(url, rows)
        with _workers(url) as workers:
            time.sleep(min(WARM_UP_SECONDS, seconds))
            quiet: list[Window] = []
            busy: list[Window] = []
            parts: list[purging.Purged] = []
            for _ in range(ROUNDS):
                quiet.append(_window(lambda: time.sleep(seconds / ROUNDS)))
                busy.append(_window(lambda: parts.append(_part(guard, rows, batch))))
            took = _took(workers)
    purged = purging.Purged(
        sum(part.removed for part in parts),
        sum(part.batches for part in parts),
        sum(part.seconds for part in parts),
        parts[-1].finished,
    )
    if purged.removed != rows // 2:
        raise AssertionError(f"{purged.removed} records were purged, and {rows // 2} had expired")
    phases = [
        _phase("before the first", took, quiet[:1]),
        _phase("before each part", took, quiet),
        _phase("while purging", took, busy),
    ]
    return Measured(rows, purged, phases, (load_before, os.getloadavg()[0]))


# From when to when, by the clock that all processes share.
Window = tuple[float, float]


def _window(work: Callable[[], object]) -> Window:
    began = time.monotonic()
    work()
    return began, time.monotonic()


def _part(guard: Guard, rows: int, batch: int) -> purging.Purged:
    """One part of the purge."""
    return purging.purge(guard.store, batch=batch, limit=-(-rows // 2 // ROUNDS))


def _load(url: str, rows: int) -> None:
    with connected(url) as connection:
        connection.execute(LOAD.format(rows=rows))
        connection.execute("VACUUM ANALYZE onefold_records")
        connection.execute("CHECKPOINT")


Took = list[tuple[float, float]]


@contextmanager
def _workers(url: str) -> Any:
    """Processes that deliver until they are asked what it took."""
    processes = multiprocessing.get_context("spawn")
    found: list[tuple[Any, Connection]] = []
    try:
        for _ in range(WORKERS):
            ours, its = processes.Pipe()
            process = processes.Process(target=_deliver, args=(url, its), daemon=True)
            process.start()
            its.close()
            found.append((process, ours))
        for _, ours in found:
            if not ours.poll(PATIENCE):
                raise AssertionError("a worker did not begin")
            ours.recv()
        yield found
    finally:
        for process, ours in found:
            ours.close()
            process.join(PATIENCE)


def _took(workers: list[tuple[Any, Connection]]) -> Took:
    """When each delivery of each worker began, by the clock that all processes share, and how long it took."""
    for _, ours in workers:
        ours.send("stop")
    took: Took = []
    for _, ours in workers:
        if not ours.poll(PATIENCE):
            raise AssertionError("a worker did not stop")
        took += ours.recv()
    return took


def _deliver(url: str, asked: Connection) -> None:
    """One worker. Its store does not purge by itself: that is not what is measured."""
    took: Took = []
    with closing(Guard(f"{url}?purge=no")) as guard:
        number = 0
        while number == 0 or not asked.poll():
            began = time.monotonic()
            guard.run("charge", f"{os.getpid()}-0000-4000-8000-{number:012d}", _handle)
            took.append((began, time.monotonic() - began))
            number += 1
            if number == 1:
                asked.send("begun")
    asked.send(took)


def _handle() -> None:
    pass


def _phase(name: str, took: Took, windows: list[Window]) -> Phase:
    found = sorted(duration for began, duration in took if any(begins <= began < ends for begins, ends in windows))
    if not found:
        raise AssertionError(f"{name}: no delivery began in that time. Give it more rows, or more seconds")
    return Phase(name, len(found), statistics.median(found), found[int(len(found) * 0.99)], found[-1])


def _show(measured: Measured) -> None:
    purged = measured.purged
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("deliveries")
    for name in ("number", "p50", "p99", "longest"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in measured.phases:
        times = (f"{value * 1e3:.2f} ms" for value in phase[2:])
        table.add_row(phase.name, f"{phase.deliveries:,}", *times)
    console = Console(highlight=False)
    console.print(table)
    took = f"{purged.seconds:.1f} s and {purged.batches:,} batches"
    console.print(f"{purged.removed:,} of {measured.rows:,} records purged in {took}")
    verdict = "met" if measured.ratio <= AT_MOST else "missed"
    console.print(f"p99 while purging / before each part: {measured.ratio:.2f}, at most {AT_MOST:.1f}: {verdict}")
    console.print(f"load of the machine: {measured.load[0]:.1f} at the beginning, {measured.load[1]:.1f} at the end")


def as_json(measured: Measured) -> dict[str, Any]:
    return {
        "rows": measured.rows,
        "purged": measured.purged._asdict(),
        "phases": [_phase_as_json(phase) for phase in measured.phases],
        "ratio": round(measured.ratio, 3),
        "at_most": AT_MOST,
        "met": measured.ratio <= AT_MOST,
        "load": measured.load,
    }


def _phase_as_json(phase: Phase) -> dict[str, Any]:
    times = {"p50_ms": phase.p50, "p99_ms": phase.p99, "longest_ms": phase.longest}
    return {"name": phase.name, "deliveries": phase.deliveries} | {
        name: round(value * 1e3, 3) for name, value in times.items()
    }


if __name__ == "__main__":
    sys.exit(main())
