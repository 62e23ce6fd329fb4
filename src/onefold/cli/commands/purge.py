"""`onefold purge`: remove expired records, from a store or from every store of a configuration."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from onefold import Guard, OnefoldError, StoreUnavailable, UsageError
from onefold.cli._common.durations import pause_of
from onefold.cli._common.opening import IN_PROCESS, missing_schema
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    Listing,
    Refusal,
    note,
    print_json,
    visible,
)
from onefold.cli._common.store_option import StoresOption, Target, the_stores
from onefold.durations import as_text
from onefold.maintenance import purge as purging
from onefold.stores.base import Inspectable
from onefold.stores.kinds import blocking, kind_of

# A store counts expired records only up to here.
COUNTED_MAX: Final = 10_000

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def purge(
    every: Annotated[
        str | None,
        typer.Option(
            "--every", show_default=False, help="Keep running, and start a new pass after this time, such as 60s."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="How many records one transaction removes.")] = purging.BATCH,
    limit: Annotated[
        int | None,
        typer.Option("--limit", show_default=False, help="The maximum number of records to remove from each store."),
    ] = None,
    store: StoresOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Remove expired records, in small batches with pauses in between, alongside the work.

    Several may run at once: each takes rows that no other has. Ctrl-C and SIGTERM end it after the batch in progress.
    Exits with 0 if nothing is left (with --every: if it was stopped), 1 if a store cannot be purged, 2 if a URL, a
    configuration or an option cannot be used, 128 plus the signal's number if it was stopped early.
    """
    pause = None if every is None else pause_of(every, "--every")
    purging.check(batch=batch, limit=limit)
    targets = the_stores(store)
    jobs = [Job(target, alone=len(targets) == 1) for target in targets]
    with _stopping() as stop:
        for _ in purging.passes(pause if any(job.waits_for_us for job in jobs) else None, stop.asked):
            for job in jobs:
                job.do(batch, limit, stop.asked, goes_on=pause is not None)
    _print(jobs, format)
    _sum_up(jobs)
    if stop.signal and pause is None and not all(job.finished for job in jobs):
        raise typer.Exit(128 + stop.signal)
    if any(job.problem for job in jobs):
        raise typer.Exit(FAILED)


class Job:
    """One store, and how many records were removed from it so far."""

    def __init__(self, target: Target, *, alone: bool) -> None:
        self.target = target
        self.alone = alone
        self.url = target.url_to_open()
        self.removed = self.batches = 0
        self.seconds = 0.0
        # Whether nothing was left at the end of the last pass.
        self.finished = False
        # For people: why there is nothing to do, or why it was not done.
        self.remark = self.problem = ""
        kind = kind_of(self.url)
        if kind.in_process:
            raise Refusal(IN_PROCESS, WRONG_USAGE)
        self.waits_for_us = not kind.expires_by_itself
        if not self.waits_for_us:
            self.finished = True
            self._say(f"{kind.name} removes expired records by itself: there is nothing to purge")

    @property
    def title(self) -> str:
        return f"{self.target.name} ({self.target.place})" if self.target.name else self.target.place

    def do(self, batch: int, limit: int | None, stop: threading.Event, *, goes_on: bool) -> None:
        """Make one pass. A store that fails stops neither the purge of others nor its own next pass."""
        if not self.waits_for_us or stop.is_set():
            return
        self.problem = ""
        try:
            with Guard(blocking(self.url)) as guard:
                self._purge(_store_of(guard), batch, limit, stop)
        except OnefoldError as error:
            self.finished = False
            self.problem = self.target.without_secrets(str(error))
            if isinstance(error, UsageError) or (self.alone and not goes_on):
                raise Refusal(self.problem, WRONG_USAGE if isinstance(error, UsageError) else FAILED) from None
            store = "" if self.alone and not self.target.name else f"{self.target.name or self.target.place}: "
            note(f"{store}{self.problem}{'. It is tried again at the next pass' if goes_on else ''}")

    def _purge(self, store: Any, batch: int, limit: int | None, stop: threading.Event) -> None:
        missing = missing_schema(store, self.url)
        if missing is not None:
            raise StoreUnavailable(missing)
        waiting = _waiting(store)
        with _progress(self.title, waiting, limit) as told:
            done = purging.purge(store, batch=batch, limit=limit, stop=stop, on_batch=told)
        self.removed += done.removed
        self.batches += done.batches
        self.seconds += done.seconds
        self.finished = done.finished

    def _say(self, remark: str) -> None:
        if remark != self.remark:
            self.remark = remark
            note(f"{self.title}: {remark}")

    def document(self) -> dict[str, object]:
        return {
            "name": self.target.name or None,
            "store": self.target.place,
            "removed": self.removed,
            "batches": self.batches,
            "seconds": round(self.seconds, 3),
            "finished": self.finished,
            "remark": self.remark or None,
            "error": self.problem or None,
        }


def _store_of(guard: Guard) -> Any:
    try:
        store = guard.store
    except ImportError as error:
        raise StoreUnavailable(f"the driver of this store is not installed: {error}") from error
    return store


def _waiting(store: Any) -> int:
    """Return how many records are expired, as far as the store counts; 0 if it does not: a purge finds out."""
    count = store.facts().get("expired_count") if isinstance(store, Inspectable) else None
    return count if isinstance(count, int) else 0


@contextmanager
def _progress(title: str, waiting: int, limit: int | None) -> Iterator[Callable[[int], None] | None]:
    """Show a bar on a terminal's standard error; without a known end if more are expired than the store counts."""
    if not sys.stderr.isatty():
        yield None
        return
    total = None if waiting >= COUNTED_MAX else waiting
    if limit is not None and (total is None or limit < total):
        total = limit
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,} removed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(visible(title), total=total)
        yield lambda removed: progress.update(task, completed=removed)


class Stop:
    """The request to stop, and the signal it came by."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.signal = 0


@contextmanager
def _stopping() -> Iterator[Stop]:
    """Stop after the current batch at the first signal; let the second one act at once, as always."""
    stop = Stop()
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in SIGNALS}

    def asked(number: int, _frame: object) -> None:
        stop.signal = number
        stop.asked.set()
        for one, handler in before.items():
            signal.signal(one, handler)

    for number in SIGNALS:
        signal.signal(number, asked)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(jobs: list[Job], format_: Format) -> None:
    if format_ is Format.JSON:
        print_json({"removed": sum(job.removed for job in jobs), "stores": [job.document() for job in jobs]})
        return
    rows = [
        (job.target.name, job.target.place, str(job.removed), str(job.batches), f"{job.seconds:.1f}")
        for job in jobs
        if job.waits_for_us
    ]
    Listing(("name", "store", "removed", "batches", "seconds")).add(rows)


def _sum_up(jobs: list[Job]) -> None:
    ours = [job for job in jobs if job.waits_for_us]
    if not ours:
        return
    removed, took = sum(job.removed for job in ours), sum(job.seconds for job in ours)
    done = all(job.finished for job in ours)
    left = "no expired records are left" if done else "there may be more"
    note(f"{removed:,} removed in {as_text(round(took, 1))}; {left}")
