"""What `python -m services up` has started: one file a server, and a lock that one test session at a time holds.

Two sessions that shared a Redis would empty it under each other: the second one starts servers of its own. What the
processes of one parallel run share is written down in the same way, in the folder of that run.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from services.home import root_folder
from services.processes import STOP_SECONDS_MAX, ServerFailed, birth, signal_one, wait_until
from services.servers import Server


@dataclass(frozen=True)
class Process:
    pid: int
    # The system gives a number out again, but never with the same moment of birth.
    birth: str
    polite: int
    folder: str

    @property
    def running(self) -> bool:
        return birth(self.pid) == self.birth

    def gone(self) -> bool:
        return not self.running


@dataclass(frozen=True)
class Entry:
    name: str
    url: str
    version: str
    origin: str
    processes: list[Process]

    @property
    def running(self) -> bool:
        return all(process.running for process in self.processes)


def folder() -> Path:
    return root_folder() / "up"


def remember(server: Server, where: Path | None = None) -> Entry:
    processes = [
        Process(daemon.pid, birth(daemon.pid), daemon.polite.value, str(daemon.folder)) for daemon in server.daemons
    ]
    entry = Entry(server.name, server.url, server.version, server.origin, processes)
    path = (where or folder()) / f"{server.name}.json"
    partial = path.with_suffix(".part")
    # The URL has a password.
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(asdict(entry), indent=1))
    partial.rename(path)
    return entry


def recall(name: str, where: Path | None = None) -> Entry | None:
    try:
        known = json.loads(((where or folder()) / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return Entry(**{**known, "processes": [Process(**process) for process in known["processes"]]})


def recall_all() -> list[Entry]:
    found = (recall(path.stem) for path in sorted(folder().glob("*.json")))
    return [entry for entry in found if entry is not None]


def end(entry: Entry) -> None:
    """End what still runs of it, the last started first, and forget it with its data."""
    for process in reversed(entry.processes):
        if process.running:
            signal_one(process.pid, signal.SIGCONT)
            signal_one(process.pid, signal.Signals(process.polite))
            try:
                wait_until(process.gone, f"{entry.name} does not end", STOP_SECONDS_MAX)
            except ServerFailed:
                signal_one(process.pid, signal.SIGKILL)
        shutil.rmtree(process.folder, ignore_errors=True)
    (folder() / f"{entry.name}.json").unlink(missing_ok=True)


def sweep() -> None:
    """Remove what nobody uses any more: the folder of `up`, and those of sessions that went down with the machine."""
    if not recall_all():
        shutil.rmtree(folder(), ignore_errors=True)
    for left in root_folder().glob("[0-9]*-*"):
        if not birth(int(left.name.partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def alone() -> Iterator[None]:
    """One `up` or `down` at a time."""
    root_folder().mkdir(parents=True, exist_ok=True)
    with locked(root_folder() / "up.lock"):
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Leases:
    """The servers of `up` that this session uses; the locks end with the process, however it ends."""

    def __init__(self) -> None:
        self._locks: list[IO[bytes]] = []

    def take(self, name: str) -> Entry | None:
        entry = recall(name)
        if entry is None or not entry.running:
            return None
        lock = (folder() / f"{name}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        self._locks.append(lock)
        return entry

    def close(self) -> None:
        while self._locks:
            self._locks.pop().close()
