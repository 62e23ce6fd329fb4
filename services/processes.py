"""One server process: started as somebody who may run it, waited for, and ended. Every wait has a bound.

Nothing here knows what kind of server it runs; and no process is ever signalled that was not started from here.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"

# Below what systems hand out to outgoing connections, so that a restarted server finds its port still free.
PORTS = range(20_000, 32_000)
PORT_TRIES_MAX = 100

# On a busy machine with two cores RabbitMQ takes twenty seconds to start, and the others a few; past this, none will.
START_SECONDS_MAX = 180.0
STOP_SECONDS_MAX = 15.0
POLL_SECONDS = 0.02
LOG_LINES_SHOWN = 20


class ServerFailed(Exception):
    """A server did not start, or did not end: the message shows the end of its log."""


def free_port() -> int:
    for _ in range(PORT_TRIES_MAX):
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerFailed(f"no free port on {HOST} between {PORTS.start} and {PORTS.stop}")


def wait_until(holds: Callable[[], bool], what: str, seconds: float = START_SECONDS_MAX) -> None:
    """Ask until it holds; an exception of a client counts as `not yet` and is shown when time is up."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except (ServerFailed, ImportError):
            raise
        except Exception as error:  # noqa: BLE001
            last = error
        time.sleep(POLL_SECONDS)
    raise ServerFailed(f"{what}: not within {seconds:.0f} s{f' ({last})' if last else ''}")


@dataclass
class Daemon:
    """A process that serves until it is told to end; it can be killed, frozen and started again on the same data."""

    name: str
    command: Sequence[str] = field(repr=False)
    folder: Path
    answers: Callable[[], bool] = field(repr=False)
    # What makes this server end in order without waiting for its clients.
    polite: signal.Signals = signal.SIGTERM
    unprivileged: bool = False
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Told of every start, also of a second one.
    started: Callable[[Daemon], None] = field(default=lambda _: None, repr=False)
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                # Ctrl-C is for the tests: they end their servers in order.
                start_new_session=True,
                **nobody(self.unprivileged),
            )
        self.started(self)
        try:
            wait_until(self._answers, f"{self.name} does not answer")
        except ServerFailed as error:
            self.kill()
            raise ServerFailed(f"{error}\n{log_tail(self.log)}") from None

    def _answers(self) -> bool:
        if not self.running:
            raise ServerFailed(f"{self.name} ended at once")
        return self.answers()

    def kill(self) -> None:
        """As a crash: no goodbye, neither from the process nor from its children. When it returns, all are gone."""
        if not self.running:
            return
        # Stopped first, it can have no more children than those we see.
        signal_one(self.pid, signal.SIGSTOP)
        family = [(pid, birth(pid)) for pid in (self.pid, *descendants(self.pid))]
        for pid, _ in family:
            signal_one(pid, signal.SIGKILL)
        self._wait(START_SECONDS_MAX)
        # PostgreSQL does not start again while a child of its last life still holds the shared memory.
        wait_until(lambda: not any(born and birth(pid) == born for pid, born in family), f"{self.name} does not die")

    def stop(self) -> None:
        """Freeze it: it holds its connections, and answers nobody. When it returns, every thread stands still."""
        self._signal_all(signal.SIGSTOP)
        family = (self.pid, *descendants(self.pid))
        wait_until(lambda: all(map(stands_still, family)), f"{self.name} does not stop", STOP_SECONDS_MAX)

    def cont(self) -> None:
        self._signal_all(signal.SIGCONT)

    def end(self) -> None:
        if not self.running:
            return
        self.cont()
        os.kill(self.pid, self.polite)
        try:
            self._wait()
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait(self, seconds: float = STOP_SECONDS_MAX) -> None:
        if self.process is not None:
            self.process.wait(seconds)

    def _signal_all(self, number: signal.Signals) -> None:
        if not self.running:
            return
        # The parent first, or it would mend what happened to its children.
        for pid in (self.pid, *descendants(self.pid)):
            signal_one(pid, number)


def signal_one(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def stands_still(pid: int) -> bool:
    """Return whether every thread has stopped, or ended. The signal stops one, which has to run to stop the others.

    Where the system does not show it, it is believed.
    """
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            # The name before may hold anything, parentheses and spaces too.
            state = thread.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "TtZX":
            return False
    return True


def nobody(unprivileged: bool) -> dict[str, Any]:  # noqa: FBT001
    """Popen's arguments for a server that refuses to run as root."""
    if not unprivileged or os.geteuid() != 0:
        return {}
    return {"user": "nobody", "group": NOBODYS_GROUP, "extra_groups": []}


NOBODYS_GROUP = "nogroup" if sys.platform == "linux" and "nogroup:" in Path("/etc/group").read_text() else "nobody"


def give_to_nobody(folder: Path) -> None:
    """What root has made for a server that runs as nobody."""
    import shutil

    if os.geteuid() == 0:
        shutil.chown(folder, "nobody", NOBODYS_GROUP)


def run_once(command: Sequence[str], folder: Path, *, unprivileged: bool = False) -> None:
    """A step of the preparation, such as initdb, that ends by itself."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START_SECONDS_MAX,
        check=False,
        **nobody(unprivileged),
    )
    if done.returncode != 0:
        raise ServerFailed(f"{command[0]} failed:\n{done.stdout.decode(errors='replace')[-2000:]}")


def descendants(pid: int) -> list[int]:
    """Every process below this one; PostgreSQL's are not in its process group."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _parents() -> list[tuple[int, int]]:
    if sys.platform != "linux":
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return [(int(child), int(parent)) for child, parent in map(str.split, listing.splitlines())]
    pairs = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold spaces; the parent is the second word after it.
                pairs.append((int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])))
            except (OSError, ProcessLookupError):
                continue
    return pairs


def birth(pid: int) -> str:
    """When a process began, or nothing if it is gone."""
    if sys.platform != "linux":
        return subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.strip()
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # One that has ended, and whose parent has not looked yet, counts as gone.
    return "" if state == "Z" else rest[18]


def log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(["the end of its log:", *lines[-LOG_LINES_SHOWN:]])
