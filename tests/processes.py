"""Real processes that stop at a named step: they report it over a pipe, and wait there for word or for a signal."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from onefold import Guard, OnefoldError
from onefold._model import Claim, Close, Commit, Ending, Entry, Gone, Record
from onefold.stores.sqlite import SqliteStore
from onefold.stores.sqlite.joined import SqliteTransaction
from services.processes import stands_still
from tests.support import PATIENCE, eventually

# Children are forked from a server that has no threads, and that has imported what takes long.
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "onefold.guard", "onefold.stores.sqlite", "onefold.testing"])


class Stage:
    """A child's end of the pipe. It passes every step, and stays at those where it is to stop."""

    def __init__(self, pipe: Connection, *stops: str) -> None:
        self._pipe = pipe
        self._stops = stops

    def at(self, step: str) -> None:
        if step in self._stops:
            self._pipe.send(step)
            if stood := self._pipe.recv():
                move_clock(stood)

    def tell(self, word: Any) -> None:
        self._pipe.send(word)


class Child:
    """A process that plays its part on a stage. What the part returns, or the name of what it raises, is its answer."""

    def __init__(self, part: Callable[..., Any], *args: Any, stops: tuple[str, ...] = ()) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_play, args=(theirs, stops, part, args), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self._pipe.poll(PATIENCE), "the child says nothing"
        return self._pipe.recv()

    def reaches(self, step: str) -> None:
        heard = self.hear()
        assert heard == step, heard

    def go_on(self, *, after: float = 0.0) -> None:
        """Let it leave the step; by its own clock it has stood there for so many seconds."""
        self._pipe.send(after)

    def signal(self, number: signal.Signals) -> None:
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, number)
        if number is signal.SIGSTOP:
            assert eventually(lambda: stands_still(pid)), "it does not stop"

    def kill(self) -> None:
        """SIGKILL; when it returns, nothing of the child can reach a store any more."""
        self.end()
        assert self._process.exitcode == -signal.SIGKILL, "it had ended before"

    def end(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)
        self._pipe.close()


def move_clock(seconds: float) -> None:
    """Move the clock of this process on, as far as claims are concerned."""

    def monotonic() -> float:
        return time.monotonic() + seconds

    patching = pytest.MonkeyPatch()
    patching.setattr("onefold._heartbeat.clock.monotonic", monotonic)
    patching.setattr("onefold._delivery.drive.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


@contextmanager
def child(part: Callable[..., Any], *args: Any, stops: tuple[str, ...] = ()) -> Iterator[Child]:
    """A child that does not outlive the block, even if it is stopped."""
    born = Child(part, *args, stops=stops)
    try:
        yield born
    finally:
        born.end()


def exit_code(pid: int) -> int:
    """How a child that was forked by hand has ended; one that hangs is killed."""
    found: list[int] = []

    def ended() -> bool:
        over, status = os.waitpid(pid, os.WNOHANG)
        found.append(status)
        return over == pid

    if not eventually(ended):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("the child did not come to an end")
    return os.waitstatus_to_exitcode(found[-1])


def _play(pipe: Connection, stops: tuple[str, ...], part: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = part(Stage(pipe, *stops), *args)
    except OnefoldError as error:
        answer = (type(error).__name__, getattr(error, "value", None))
    pipe.send(answer)


class StoppingStore(SqliteStore):
    """A store in a file that brings its process on the stage before and after everything that ends up in the file."""

    def __init__(self, path: Path, stage: Stage) -> None:
        super().__init__(path, busy_timeout=PATIENCE)
        self._stage = stage

    def claim(self, entry: Entry, *, replacing: Record | None = None) -> Record | Gone | None:
        self._stage.at("before the claim")
        found = super().claim(entry, replacing=replacing)
        self._stage.at("after the claim")
        return found

    def finish(self, claim: Claim, ending: Ending) -> bool:
        self._stage.at("before the finish")
        ours = super().finish(claim, ending)
        self._stage.at("after the finish")
        return ours

    def close_all(self, closes: Sequence[Close]) -> list[bool]:
        self._stage.at("before the finish")
        ours = super().close_all(closes)
        self._stage.at("after the finish")
        return ours

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        with super().transaction() as transaction:
            yield StoppingTransaction(transaction, self._stage)


class StoppingTransaction(SqliteTransaction):
    """The same for a transaction."""

    def __init__(self, inner: SqliteTransaction, stage: Stage) -> None:
        super().__init__(inner._records, inner._path, inner.patience)
        self._stage = stage

    def begin(self) -> None:
        self._stage.at("before BEGIN")
        super().begin()

    def begun(self) -> bool:
        begun = super().begun()
        if not begun:
            self._stage.at("behind another transaction")
        return begun

    def commit(self) -> Commit:
        self._stage.at("before COMMIT")
        committed = super().commit()
        self._stage.at("after COMMIT")
        return committed


def lapse(path: Path) -> None:
    """End every lease in the file of a store; fail at once if somebody writes to it."""
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        connection.execute("UPDATE onefold_records SET lease_until = began")


class Notes:
    """Words in a file, one a line, which outlive whoever wrote them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, word: str) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{word}\n".encode())
        os.close(file)

    def read(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []


def guard_on(path: Path, stage: Stage | None = None, **options: Any) -> Guard:
    """A guard on this file; with a stage, one that stops there."""
    store = SqliteStore(path, busy_timeout=PATIENCE) if stage is None else StoppingStore(path, stage)
    return Guard(store, **options)
