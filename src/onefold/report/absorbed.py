"""Write down which deliveries were absorbed, in batches: no store writes anything for a duplicate.

One line of JSON for each batch, appended in one write, so that many processes may share a file. What a process that is
killed has not written yet, or has written in part, is not counted: a report says less than happened, never more.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from onefold import Event, UsageError, subscribe
from onefold._concurrency import forks
from onefold.durations import Duration, seconds
from onefold.metrics.table import REFUSALS, outcome

REPLAYED: Final = "replayed"
IN_PROGRESS: Final = REFUSALS["InProgress"]

# How many keys wait in memory at most.
WAITING_MAX: Final = 1_000

# Keys may be personal: for the owner only.
MODE: Final = 0o600

# What a process can have counted, and the times that a date can tell: the years 1970 to 9999. Other lines are broken.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Second = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]


class Duplicates(msgspec.Struct, frozen=True, array_like=True):
    """The duplicates of one key: how many were answered from its record, and how many refused while it ran."""

    operation: str
    scope: str
    key: str
    absorbed: Count
    refused: Count


class Batch(msgspec.Struct, frozen=True):
    """One line: what one process has seen from one moment to another."""

    begin: Second
    end: Second
    duplicates: list[Duplicates]


class Absorbed:
    """Counts absorbed duplicates in a file: `Absorbed("absorbed.jsonl").install()`, once per process.

    It writes at most once in `every`, after a duplicate, and at the end of the process. Only duplicates cost anything.
    """

    def __init__(self, path: str | Path, *, every: Duration = "10s", clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise UsageError(f"Absorbed({str(path)!r}): there is no folder {self._path.parent}")
        self._every = seconds(every, "every")
        self._clock = clock
        self._generation = forks.generation
        self._begin = clock()
        self._waiting: Counter[tuple[str, str, str, str]] = Counter()
        forks.set_lock(self, "_counting")

    _counting: threading.Lock

    def install(self) -> Callable[[], None]:
        """Count the duplicates of all guards in this process; call the returned function to stop."""
        unsubscribe = subscribe(self)
        atexit.register(self.flush)

        def uninstall() -> None:
            unsubscribe()
            atexit.unregister(self.flush)
            self.flush()

        return uninstall

    def __call__(self, event: Event) -> None:
        found = outcome(event)
        if found not in (REPLAYED, IN_PROGRESS):
            return
        address = event.address
        with self._counting:
            self._forget_the_parents()
            self._waiting[address.operation, address.scope, address.key, found] += 1
            due = len(self._waiting) >= WAITING_MAX or self._clock() - self._begin >= self._every
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._counting:
            self._forget_the_parents()
            waiting, self._waiting = self._waiting, Counter()
            begin, self._begin = self._begin, self._clock()
            if waiting:
                _append(self._path, Batch(begin, self._begin, _by_key(waiting)))

    def _forget_the_parents(self) -> None:
        """Leave to the parent of a forked child what the parent has counted."""
        if self._generation != forks.generation:
            self._generation, self._waiting = forks.generation, Counter()


def _by_key(waiting: Counter[tuple[str, str, str, str]]) -> list[Duplicates]:
    keys = {(operation, scope, key) for operation, scope, key, _ in waiting}
    return [Duplicates(*key, waiting[(*key, REPLAYED)], waiting[(*key, IN_PROGRESS)]) for key in sorted(keys)]


def _append(path: Path, batch: Batch) -> None:
    # Opened anew each time, so that the file may be rotated away.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)
    try:
        # The first line feed ends a line that a process left half-written: it would take this batch with it.
        os.write(descriptor, b"\n" + msgspec.json.encode(batch) + b"\n")
    finally:
        os.close(descriptor)


def batches(paths: Iterable[Path]) -> Iterator[Batch | None]:
    """Yield the batches of files; None for a line that cannot be read, such as the last one of a full disk.

    Empty lines are nothing.
    """
    decoder: Any = msgspec.json.Decoder(Batch)
    for path in paths:
        with path.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    yield None
