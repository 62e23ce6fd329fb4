"""A store that processes share: the rows of a memory store in a file, under a lock. Small, slow, on a real clock."""

from __future__ import annotations

import fcntl
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onefold.stores.base import Address, Claim, Ending, Entry, Gone, Record, Released
from onefold.stores.memory import MemoryStore


class FileStore:
    """A `Store` without optional capabilities."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        with self._rows() as rows:
            return rows.claim(entry, replacing=replacing)

    def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        with self._rows() as rows:
            return rows.extend(claim, notes)

    def finish(self, claim: Claim, ending: Ending) -> bool:
        with self._rows() as rows:
            return rows.finish(claim, ending)

    def release(self, claim: Claim, released: Released | None = None) -> bool:
        with self._rows() as rows:
            return rows.release(claim, released)

    def read(self, address: Address) -> Record | None:
        with self._rows() as rows:
            return rows.read(address)

    def purge(self, limit: int) -> int:
        with self._rows() as rows:
            return rows.purge(limit)

    @contextmanager
    def _rows(self) -> Iterator[MemoryStore]:
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            stored = file.read()
            rows = MemoryStore(clock=time.time)
            if stored:
                rows._rows = pickle.loads(stored)
            yield rows
            file.seek(0)
            file.truncate()
            file.write(pickle.dumps(rows._rows))


class AsyncFileStore:
    """The async counterpart."""

    def __init__(self, path: Path) -> None:
        self.sync = FileStore(path)

    async def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        return self.sync.claim(entry, replacing=replacing)

    async def extend(self, claim: Claim, notes: bytes | None = None) -> bool:
        return self.sync.extend(claim, notes)

    async def finish(self, claim: Claim, ending: Ending) -> bool:
        return self.sync.finish(claim, ending)

    async def release(self, claim: Claim, released: Released | None = None) -> bool:
        return self.sync.release(claim, released)

    async def read(self, address: Address) -> Record | None:
        return self.sync.read(address)

    async def purge(self, limit: int) -> int:
        return self.sync.purge(limit)


def open_in_a_file_of_its_own(folder: Path) -> FileStore:
    """Broken on purpose: every process that opens it sees other records."""
    return FileStore(folder / str(os.getpid()))
