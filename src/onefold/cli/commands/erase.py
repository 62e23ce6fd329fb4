"""`onefold erase`: remove every record of one scope, for a tenant that leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from threading import Condition, Lock
from typing import Annotated, Final, Self

import msgspec
import typer

from onefold import Guard, InProgress, Record
from onefold.cli._common import asking
from onefold.cli._common.asking import YesOption
from onefold.cli._common.find import records, unmatched, watched
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    OperationOption,
    Refusal,
    note,
    print_json,
    visible,
)
from onefold.cli._common.progress import DryRunOption, summed_up
from onefold.cli._common.store_option import StoreOption, the_store
from onefold.health.report import counted
from onefold.maintenance.purge import purge
from onefold.stores.base import Query

# A removal is two small writes, each of which a database syncs. Concurrent removals share the syncs.
WORKERS: Final = 8
BATCH: Final = 200

# The confirmation names no more operations than a line holds.
NAMED_MAX: Final = 10


class Erased(msgspec.Struct):
    """The progress of an erasure."""

    erased: int = 0
    # A worker is running them, or they were written meanwhile.
    left: int = 0
    purged: int = 0

    @property
    def summary(self) -> str:
        left = f", {self.left:,} left" if self.left else ""
        return f"{self.erased:,} erased{left}"


class Removals:
    """The removals in progress. At its end there are none, so that the count is correct even after an interrupt.

    An executor does not wait for a thread that was being started when the interrupt came.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._under_way = 0
        self._is_over = False

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Begin a removal, and end it. Yield False if it is too late to begin."""
        with self._changed:
            if self._is_over:
                yield False
                return
            self._under_way += 1
        try:
            yield True
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._under_way)


def erase(
    scope: Annotated[str, typer.Option("--scope", help="The tenant or caller. Required.", show_default=False)] = "",
    operation: OperationOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Remove all records of a tenant or caller. Anything delivered for it after that runs, whatever happened before.

    Records that a worker is running right now are not removed. Expired records that have not been purged yet are.

    Exits with 0 if nothing of the scope is left, 1 if something is, or if you answered no.
    """
    if not scope:
        # In a script, an empty scope is an unset variable; and the callers without a scope are not a tenant.
        raise Refusal("whose records? Pass --scope NAME, which must not be empty", WRONG_USAGE)
    where, query = the_store(store), Query(scope=scope, operation=operation)
    if not (yes or dry_run):
        asking.check_terminal()
    with opened(where) as guard:
        running, by_operation = _counted(guard, query)
        count = by_operation.total()
        if count and not (yes or dry_run):
            asking.confirm(_question(scope, running, by_operation))
        erased = Erased(count - running, running) if dry_run else _erase(guard, query)
        _print(erased, by_operation, scope, format, dry_run=dry_run)
        if not (count or erased.erased or erased.left):
            # Not an error: what was interrupted is run again until nothing is left.
            note(unmatched(guard.store, query, done="erased"))
    if erased.left and not dry_run:
        note(
            f"{erased.left:,} are left: a worker is running them, or they arrived during the erasure. Run it again "
            "when they have ended"
        )
        raise typer.Exit(FAILED)


def _counted(guard: Guard, query: Query) -> tuple[int, Counter[str]]:
    running, by_operation = 0, Counter[str]()
    for record in watched(records(guard.store, query), "counting"):
        by_operation[record.address.operation] += 1
        running += record.is_live
    return running, by_operation


def _question(scope: str, running: int, by_operation: Counter[str]) -> str:
    kinds = ", ".join(f"{visible(name)} {count:,}" for name, count in by_operation.most_common(NAMED_MAX))
    more = ", and others" if len(by_operation) > NAMED_MAX else ""
    besides = f" {running:,} of them are running, and stay." if running else ""
    return (
        f"Erase {counted(by_operation.total(), 'record')} of {visible(scope)} ({kinds}{more})?{besides} "
        "Anything delivered for it after that will run, whatever has happened before."
    )


def _erase(guard: Guard, query: Query) -> Erased:
    progress, counting, removals, found = Erased(), Lock(), Removals(), records(guard.store, query)

    def remove(record: Record) -> None:
        with removals.one() as may_begin:
            if may_begin and _forgotten(guard, record):
                with counting:
                    progress.erased += 1

    with (
        summed_up("erasing", "records", lambda: progress.summary if progress.erased else "") as tell,
        removals,
        ThreadPoolExecutor(WORKERS, thread_name_prefix="onefold-erase") as workers,
    ):
        while batch := list(islice(found, BATCH)):
            for _ in workers.map(remove, batch):
                tell(progress.erased)
        # Expired records are no longer listed, and may hold results of this tenant until they are purged.
        progress.purged = purge(guard.store).removed
        progress.left = sum(1 for _ in records(guard.store, query))
    return progress


def _forgotten(guard: Guard, record: Record) -> bool:
    """Return whether it was removed. A record that a worker is running stays."""
    address = record.address
    try:
        return guard.forget(address.operation, address.key, scope=address.scope)
    except InProgress:
        return False


def _print(erased: Erased, by_operation: Counter[str], scope: str, format_: Format, *, dry_run: bool) -> None:
    if format_ is Format.JSON:
        found = {"scope": scope, "found": by_operation.total(), "operations": dict(sorted(by_operation.items()))}
        counts = {"erased": 0 if dry_run else erased.erased, "left": erased.left, "purged": erased.purged}
        print_json(found | counts | {"dry_run": dry_run})
    elif dry_run:
        running = f", {erased.left:,} are running" if erased.left else ""
        typer.echo(f"{visible(scope)}: {erased.erased:,} would be erased{running}")
    else:
        typer.echo(f"{visible(scope)}: {erased.summary}")
