"""`python -m bench.postgres_parts`: where a delivery on PostgreSQL spends its time, beside the same work by hand.

Three sides take turns: the least that somebody would write by hand; the same with Onefold's own statement in its place,
sent by psycopg, which is the least that the record of Onefold costs (an address, a token, a fingerprint, an expiry, an
answer to read back); and Onefold. The step from the first to the second is the server's, the step from the second to
the third is Python's.

Client and server are bound to one CPU. Otherwise the scheduler moves them apart as soon as a client computes for some
20 µs between two statements, and from then on each message has to wake another CPU that has gone to sleep: on a virtual
machine that takes longer than the statement. `--spread` shows it: a fourth side is by hand with a pause of so many
microseconds, in which it computes, as Onefold or any application does.

The last table leaves the driver out, too: each statement by libpq alone, which is the server's part and two system
calls. psycopg's cursor takes as long again, and longer the more columns and values a statement has.

Nothing is asserted. The frames, round trips and bytes are exact; of the times read the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.pq import ExecStatus
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.measure import Side, Taken, fresh_keys, take_turns
from bench.sides import by_hand, joined, onefold, statements
from onefold import Guard
from onefold.stores.postgres.statements import usual
from onefold.stores.sql.records import in_numbers
from services.house import House

SECONDS: Final = 6.0

# The computing of the fourth side of `--spread`.
PAUSE_MICROSECONDS: Final = 40

# Of the last table: each statement, as first and as duplicate.
STATEMENT_ROUNDS: Final = 1_500
STATEMENTS: Final = {
    "by hand: INSERT … ON CONFLICT DO NOTHING": joined.DEDUP.replace("%s", ":key"),
    "by hand: SELECT by key": "SELECT seen FROM by_hand WHERE id = :key",
    "ours, in a transaction of the caller's": usual.INSERT_MARKED,
    "ours, a claim": usual.INSERT_RUNNING,
}

# Deliveries before frames and bytes are counted: psycopg prepares a statement at its sixth execution.
WARM_UP: Final = 30


class Part(NamedTuple):
    """One kind of delivery: by hand, by hand with our statement, and ours."""

    name: str
    sides: Sequence[Callable[[House], Any]]


class Counted(NamedTuple):
    """What one delivery costs, without a clock."""

    frames: int
    ours: int
    round_trips: int
    wal: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.postgres_parts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each kind (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], metavar="KIND")
    parser.add_argument(
        "--spread", action="store_true", help="leave the CPUs to the scheduler, and add a pause by hand"
    )
    asked = parser.parse_args(arguments)
    with closing(House()) as house:
        for part in PARTS:
            if not asked.only or part.name in asked.only:
                _show(part.name, *_measured(part, house, seconds=asked.seconds, spread=asked.spread))
        if not asked.only:
            _show_statements(_statements(house))
    return 0


def _measured(
    part: Part, house: House, *, seconds: float, spread: bool
) -> tuple[list[Side], list[list[Counted]], Taken]:
    with ExitStack() as stack:
        sides = [stack.enter_context(side(house)) for side in part.sides]
        if spread and part.name == "within":
            sides.append(stack.enter_context(with_pause(house)))
        looking = stack.enter_context(closing(psycopg.connect(house["postgres"].url, autocommit=True)))
        counted = [_counted(side, looking) for side in sides]
        if not spread:
            stack.enter_context(_on_one_cpu(looking))
        return sides, counted, take_turns(sides, seconds=seconds)


def _counted(side: Side, looking: Any) -> list[Counted]:
    """Count one first delivery, and one duplicate."""
    keys = list(fresh_keys(WARM_UP))[: WARM_UP + 1]
    for key in keys[1:]:
        side.first(key)
        side.duplicate(key)
    return [_count(side.first, keys[0], looking), _count(side.duplicate, keys[0], looking)]


def _count(deliver: Callable[[str], Any], key: str, looking: Any) -> Counted:
    frames: list[Any] = []

    def profile(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            frames.append(frame.f_code)

    before = looking.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0]
    sys.setprofile(profile)
    try:
        deliver(key)
    finally:
        sys.setprofile(None)
    wal = looking.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [before]).fetchone()[0]
    # psycopg waits once for the replies to one message.
    waits = [code for code in frames if code is psycopg.Connection.wait.__code__]
    ours = [code for code in frames if f"{os.sep}onefold{os.sep}" in code.co_filename]
    return Counted(len(frames), len(ours), len(waits), int(wal))


@contextmanager
def _on_one_cpu(looking: Any) -> Iterator[None]:
    """Bind this process and the server's to one CPU."""
    before = os.sched_getaffinity(0)
    found = looking.execute("SELECT pid FROM pg_stat_activity").fetchall()
    processes, cpu = [0, *(pid for (pid,) in found)], {max(before)}
    try:
        for process in processes:
            os.sched_setaffinity(process, cpu)
        yield
    finally:
        for process in processes:
            try:
                os.sched_setaffinity(process, before)
            except ProcessLookupError:
                continue


def _show(name: str, sides: Sequence[Side], counted: Sequence[Sequence[Counted]], taken: Taken) -> None:
    table = Table(box=SIMPLE, pad_edge=False, title=name, title_justify="left")
    for column in ("call", "side"):
        table.add_column(column)
    for column in ("p50", "÷ by hand", "round trips", "frames", "ours", "WAL bytes"):
        table.add_column(column, justify="right")
    for number, (call, times) in enumerate((("first", taken.first), ("duplicate", taken.duplicate))):
        limit = statistics.median(times[0])
        for side, counts, took in zip(sides, counted, times, strict=True):
            median, found = statistics.median(took), counts[number]
            cells = (found.round_trips, found.frames, found.ours, found.wal)
            table.add_row(call, side.title, f"{median * 1e6:.0f} µs", f"{median / limit:.2f}", *map(str, cells))
    Console(width=110).print(table)


def _statements(house: House) -> dict[str, tuple[list[float], list[float]]]:
    """Measure each statement in a transaction, first and again for the same key, prepared and sent by libpq."""
    with joined.wallet(house) as (url, connection), Guard(url) as guard:
        guard.read("credit", "none")
        pgconn, prepared = connection.pgconn, []
        for title, statement in STATEMENTS.items():
            text, names = in_numbers(statement)
            pgconn.prepare(title.encode(), text.encode())
            prepared.append((title, names))
        taken: dict[str, tuple[list[float], list[float]]] = {title: ([], []) for title in STATEMENTS}
        with _on_one_cpu(connection):
            for key in itertools.islice(fresh_keys(STATEMENT_ROUNDS), STATEMENT_ROUNDS):
                for title, names in prepared:
                    values = [_in_text(statements._values(key)[name]) for name in names]
                    pgconn.exec_(b"BEGIN")
                    for times in taken[title]:
                        began = time.perf_counter()
                        result = pgconn.exec_prepared(title.encode(), values)
                        times.append(time.perf_counter() - began)
                        assert result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK), result.error_message
                    pgconn.exec_(b"ROLLBACK")
        return taken


def _in_text(value: Any) -> bytes | None:
    if isinstance(value, bytes):
        return b"\\x" + value.hex().encode()
    return None if value is None else str(value).encode()


def _show_statements(taken: dict[str, tuple[list[float], list[float]]]) -> None:
    table = Table(box=SIMPLE, pad_edge=False, title="each statement, by libpq", title_justify="left")
    table.add_column("statement")
    table.add_column("first, p50", justify="right")
    table.add_column("again, p50", justify="right")
    for title, times in taken.items():
        table.add_row(title, *(f"{statistics.median(took) * 1e6:.1f} µs" for took in times))
    Console(width=110).print(table)


@contextmanager
def with_pause(house: House) -> Iterator[Side]:
    """By hand, in an application that computes before it sends the statement."""
    with joined.wallet(house) as (_, connection):

        def compute() -> None:
            ends = time.perf_counter() + PAUSE_MICROSECONDS / 1e6
            while time.perf_counter() < ends:
                pass

        def deliver(key: str) -> None:
            with connection.transaction():
                compute()
                if connection.execute(joined.DEDUP, [key]).rowcount:
                    connection.execute(joined.CREDIT)

        title = f"by hand, computing for {PAUSE_MICROSECONDS} µs"
        yield Side(title, deliver, deliver, lambda: joined.balance(connection))


PARTS: Final = (
    Part("within", (joined.by_hand, statements.within, joined.within, joined.transactional)),
    Part("a batch of 100", (joined.fresh_by_hand, statements.batch, joined.fresh)),
    Part("claim mode", (by_hand.postgres, statements.claim, onefold.postgres)),
)


if __name__ == "__main__":
    sys.exit(main())
