"""Start, watch and kill the processes of the demo, and leave none behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

# Far more than a process needs for anything here; it bounds how long a broken one hangs.
PATIENCE: Final = 60.0

# A pid in decimal digits, and the end of its line.
PID_BYTES: Final = 32


class Failure(Exception):
    """A process of the demo did not do its part, so there is nothing to show."""


class Event(NamedTuple):
    """Something that a process did, by its own clock."""

    at: float
    who: str
    pid: int
    kind: str
    text: str


Listener = Callable[[Event], None]


class Actor:
    """One running process. Its pid stays its own while the stage is open, even after its death."""

    def __init__(self, role: str, pid: int, stdin: int, stdout: int, complaints: Path, listener: Listener) -> None:
        self.role = role
        self.pid = pid
        self._stdin = stdin
        self._complaints = complaints
        self._listener = listener
        self._heard: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ear = threading.Thread(target=self._listen, args=(stdout,), daemon=True)
        self._ear.start()

    def expect(self, kind: str) -> Event:
        """Wait until the process reports an event of this kind."""
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                event = self._heard.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"did not get to {kind!r} within {PATIENCE:g} s") from None
            if event is None:
                raise self._failure(f"ended before {kind!r}")
            if event.kind == kind:
                return event

    def finish(self) -> None:
        """Wait until the process has ended successfully."""
        self.expect("end")
        self._ear.join()

    def kill(self) -> None:
        """Send SIGKILL, so that it cannot do anything more. Return when it is dead."""
        if self._stdin < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # The kernel closes a process's files only when it is dead.
        self._ear.join()
        os.close(self._stdin)
        self._stdin = -1

    def _listen(self, stdout: int) -> None:
        with open(stdout, "rb") as lines:
            for line in lines:
                told = json.loads(line)
                event = Event(told["at"], self.role, self.pid, told["kind"], told["words"])
                self._listener(event)
                self._heard.put(event)
        self._heard.put(None)

    def _failure(self, what: str) -> Failure:
        last = self._complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return Failure(f"the {self.role} {what}{''.join(f': {line}' for line in last)}")


class Stage:
    """All processes of one run of the demo. Leaving it kills those that are still there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._turn = threading.Lock()
        self._actors: list[Actor] = []
        self._orders, theirs = socket.socketpair()
        self._closed = False
        # The folder is visible in a list of processes.
        command = [sys.executable, "-P", "-m", "onefold.demo.worker", str(folder)]
        with theirs, (folder / "stderr").open("wb") as stderr:
            self._nursery = subprocess.Popen(  # noqa: S603 - this very Python, and a module of ours
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=stderr, env=_environment()
            )

    def start(self, role: str, plan: dict[str, Any], listener: Listener) -> Actor:
        # Under the lock: nothing may be started during `close`.
        with self._turn:
            if self._closed:
                raise Failure("the demo was stopped")
            complaints = self.folder / f"stderr-{len(self._actors)}"
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
                stdin, keep = _pipe(read=theirs, write=ours)
                hear, stdout = _pipe(read=ours, write=theirs)
                stderr = theirs.enter_context(complaints.open("wb"))
                pid = self._order(role, plan, [stdin, stdout, stderr.fileno()])
                # From here on the actor closes them.
                ours.pop_all()
            actor = Actor(role, pid, keep, hear, complaints, listener)
            self._actors.append(actor)
            return actor

    def _order(self, role: str, plan: dict[str, Any], streams: list[int]) -> int:
        """Return the pid of a new process with these streams."""
        try:
            socket.send_fds(self._orders, [json.dumps([role, plan]).encode() + b"\n"], streams)
            answer = self._orders.recv(PID_BYTES)
        except OSError:
            answer = b""
        if not answer:
            raise Failure(
                f"no {role} was started: {(self.folder / 'stderr').read_text(encoding='utf-8').strip()[-200:]}"
            )
        return int(answer)

    def close(self) -> None:
        with self._turn:
            self._closed = True
            for actor in self._actors:
                actor.kill()
            self._orders.close()
            self._nursery.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pipe(*, read: contextlib.ExitStack, write: contextlib.ExitStack) -> tuple[int, int]:
    """Create a pipe whose ends are closed with these."""
    reads, writes = os.pipe()
    read.callback(os.close, reads)
    write.callback(os.close, writes)
    return reads, writes


def _environment() -> dict[str, str]:
    """Return an environment in which a child finds the same modules, wherever we were started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}
