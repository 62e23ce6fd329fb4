"""The command: which stores, which modes, what strikes; one table a store, and 1 if a promise did not hold."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console
from rich.table import Table

import bench.soak
from bench.soak.cancelling import DRIVERS, preload
from bench.soak.effects import Bank
from bench.soak.environments import FAILING_OVER, STORES, Environment, opened
from bench.soak.losses import losses, told
from bench.soak.plan import (
    FULL,
    FULL_CANCEL,
    FULL_FAILOVER,
    SHORT,
    SHORT_CANCEL,
    SHORT_FAILOVER,
    WORKERS,
    Mode,
    Plan,
    Size,
)
from bench.soak.queue import Queue
from bench.soak.verdict import NOTHING, Found, leave_evidence, look, violations
from bench.soak.workers import Desk
from services.house import House
from services.programs import Missing, in_ci

# How many lines of evidence a person wants to read.
EVIDENCE_MAX: Final = 20


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    size = _size(asked)
    if set(asked.modes_by_store) <= set(FAILING_OVER):
        size = _size(asked, next(iter(asked.modes_by_store)))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"seed {asked.seed}, {WORKERS} processes, {size.deliveries:,} deliveries, {size.messages:,} messages")
    if asked.cancel:
        console.print(f"for each of {len(DRIVERS)} async drivers, whose tasks are cancelled: {', '.join(DRIVERS)}")
    holds = True
    with closing(House()) as house:
        for store, modes in asked.modes_by_store.items():
            try:
                with opened(store, house, sync=asked.sync) as environment:
                    holds &= _soak_store(store, environment, modes, asked, console)
            except Missing as error:
                console.print(f"{store}: {'CI needs it' if in_ci() else 'skipped'}: {error}", style="yellow")
                holds &= not in_ci()
    return 0 if holds else 1


def _size(asked: Any, store: str = "") -> Size:
    if store in FAILING_OVER:
        return SHORT_FAILOVER if asked.short else FULL_FAILOVER
    if asked.cancel:
        return SHORT_CANCEL if asked.short else FULL_CANCEL
    return SHORT if asked.short else FULL


def _plans(store: str, modes: Sequence[Mode], asked: Any) -> Iterator[tuple[str, Plan]]:
    """The runs on one store, each with its title: one a mode, or one an async driver of its database."""
    drivers = [name for name, driver in DRIVERS.items() if driver.environment == store] if asked.cancel else [""]
    for mode, driver in product(modes, drivers):
        title = driver or mode
        folder = Path(tempfile.mkdtemp(prefix=f"onefold-soak-{store}-{title}-", dir=asked.directory))
        guarded, struck = not asked.without_guard, _is_struck(asked, store)
        yield (
            title,
            Plan(store, mode, _size(asked, store), asked.seed, folder, guarded, struck, asked.seconds_max, driver),
        )


def _is_struck(asked: Any, store: str) -> bool:
    return store in FAILING_OVER or (asked.strike_server and store != "sqlite")


def _soak_store(store: str, environment: Environment, modes: Sequence[Mode], asked: Any, console: Console) -> bool:
    """One run a mode, and their table."""
    rows: list[dict[str, str]] = []
    titles: list[str] = []
    for title, plan in _plans(store, modes, asked):
        folder = plan.folder
        titles.append(title)
        try:
            row, wrong = soak(plan, environment)
        except SystemExit:
            # Somebody does not want to know any more.
            shutil.rmtree(folder)
            raise
        lossy = "[yellow]loses, as said" if environment.loses else "[green]holds"
        rows.append(row | {"": "[red]broken" if wrong else lossy})
        if wrong:
            console.print(f"{store}, {title}: {len(wrong)} violations; the files are in {folder}", style="red")
            console.print("\n".join(f"  {line}" for line in wrong[:EVIDENCE_MAX]))
        else:
            shutil.rmtree(folder)
    console.print(f"\n{environment.title}{', its server struck' if _is_struck(asked, store) else ''}")
    console.print(_table(titles, rows))
    return not any("broken" in row[""] for row in rows)


def soak(plan: Plan, environment: Environment) -> tuple[dict[str, str], list[str]]:
    """One run: its counts as a person reads them, and what it broke."""
    room = environment.room(plan.folder)
    effects = room.ledger if plan.mode == "transactional" else Bank(plan.folder / "bank.db")
    assert effects is not None
    effects.create()
    plan.journal.touch()
    if plan.driver:
        preload(plan.driver)
    desk = Desk(plan, room.url, effects)
    queue = Queue(desk, environment)
    took = queue.run()
    found = _found(desk, queue)
    wrong = list(violations(queue, found))
    if wrong:
        leave_evidence(queue, found, wrong)
    if environment.loses and not wrong:
        print(f"{plan.store}, {plan.mode}: {told(plan, found)}", file=sys.stderr, flush=True)
    return _row(queue, found, took), wrong


def _found(desk: Desk, queue: Queue) -> Found:
    """What is left; where a run was given up there may be nothing to look at, and its own errors matter more."""
    try:
        return look(desk)
    except Exception:
        if not queue.errors:
            raise
        return NOTHING


def _row(queue: Queue, found: Found, took: float) -> dict[str, str]:
    counts, plan = queue.counts, queue.plan
    claims = plan.mode != "transactional"
    extra = sum(starts - 1 for starts in found.starts.values() if starts > 1)
    return {
        "deliveries": f"{plan.size.deliveries:,}",
        "sent, with redeliveries": f"{counts['sent']:,}",
        "kills": str(counts["kill"]),
        "stops past the lease": str(counts["stop"]),
        "kills of the server": str(counts["server"]) if plan.strikes_server else "-",
        "seconds without a server": f"{queue.outages.seconds:.1f}" if plan.strikes_server else "-",
        "ran": f"{counts['ran']:,}",
        "ran, not remembered": str(counts["forgotten"]),
        "replayed": f"{counts['replayed']:,}",
        "cancelled": f"{counts['cancelled']:,}" if plan.driver else "-",
        "given back for later": f"{counts['later']:,}",
        "store unavailable": f"{counts['busy']:,}",
        "told that the claim was lost": str(counts["lost"]),
        "handlers started again": str(extra) if claims else "-",
        "effects": f"{found.calls.total():,}",
        "effects downstream, by key": f"{found.charges.total():,}" if claims else "-",
        "messages done": f"{len(found.done):,}",
        "messages held": str(len(found.held)),
        "seconds": f"{took:.1f}",
        "deliveries/s": f"{counts['acknowledged'] / took:,.0f}",
    } | (losses(plan, found) if queue.environment.loses else {})


def _table(modes: Sequence[str], rows: Sequence[dict[str, str]]) -> Table:
    table = Table("", *modes, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=(bench.soak.__doc__ or "").partition("\n")[0]
    )
    option = parser.add_argument
    option(
        "--store",
        dest="stores",
        action="append",
        choices=(*STORES, "all"),
        help="sqlite if not said; may be given again",
    )
    option("--strike-server", action="store_true", help="kill the store's server in the middle, and start it again")
    option(
        "--cancel",
        action="store_true",
        help="cancel tasks at random, once and repeatedly, on every async driver, beside the kills; transactional only",
    )
    option("--short", action="store_true", help="2,000 deliveries and 8 kills, as CI runs it")
    option("--seed", type=int, default=random.randrange(1_000_000), help="repeat a run's order and strikes")
    option("--sync", choices=("full", "normal"), default="full", help="how SQLite syncs the records")
    option("--without-guard", action="store_true", help="show what happens then: it must fail")
    option("--mode", dest="modes", action="append", choices=get_args(Mode), help="only this one; may be given again")
    option("--directory", help="where the files go (a temporary directory)")
    option("--seconds-max", type=float, default=900.0, help="when to give a run up")
    asked = parser.parse_args(arguments)
    stores, modes = asked.stores or ["all" if asked.cancel else "sqlite"], asked.modes or get_args(Mode)
    if asked.cancel:
        if asked.strike_server or asked.without_guard or "transactional" not in modes:
            parser.error("--cancel is for transactional mode, with a guard, and without strikes at the server")
        modes = ["transactional"]
    chosen = {
        store: [mode for mode in able if mode in modes]
        for store, able in STORES.items()
        if store in stores or ("all" in stores and store not in FAILING_OVER)
    }
    asked.modes_by_store = {store: modes for store, modes in chosen.items() if modes}
    if not asked.modes_by_store:
        parser.error(f"{', '.join(chosen)} has no mode {', '.join(modes)}: a record there shares no transaction")
    if asked.strike_server and set(chosen) == {"sqlite"}:
        parser.error("--strike-server: sqlite has no server; name another --store")
    return asked


if __name__ == "__main__":
    # So that it leaves by the same door as always, where the workers and the servers are ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
