"""Where servers live: a folder that their users can reach, and who ends them if nobody else does.

A home of a test session has a watchdog; a home of `python -m services up` has none, for its servers stay. The servers
that the processes of a parallel run share live in one home, whose watchdog the process has that started the others.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from services.processes import START_SECONDS_MAX, Daemon, ServerFailed, birth

PROJECT = Path(__file__).resolve().parent.parent

# Of the processes that a watchdog ends, in the folder that it removes: a line each, `pid signal birth`.
LIST = "processes.txt"


def root_folder() -> Path:
    """`.services/`, or a temporary folder where root's own folders hide the project from `nobody`."""
    if "ONEFOLD_SERVICES_FOLDER" in os.environ:
        return Path(os.environ["ONEFOLD_SERVICES_FOLDER"])
    if os.geteuid() != 0 or reachable(PROJECT):
        return PROJECT / ".services"
    folder = Path(tempfile.gettempdir()) / f"onefold-services-{hashlib.sha256(bytes(PROJECT)).hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != 0:
        raise ServerFailed(f"{folder} is somebody else's: remove it")
    return folder


def reachable(path: Path) -> bool:
    """Whether a stranger may enter every folder on the way."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents) if folder.is_dir())


def open_to_all(path: Path) -> None:
    """Root's umask may have closed what nobody has to enter, to read or to run."""
    if os.geteuid() == 0:
        mode = path.stat().st_mode
        path.chmod(mode | (0o555 if mode & stat.S_IXUSR else 0o444))


class Watchdog:
    """Ends the processes that the folder's list names once this session is over, however that came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.watchdog", self.folder],
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def watch(self, daemon: Daemon) -> None:
        """Put a process on the list. Several sessions write to that of a shared home, each a line at a time."""
        with (self.folder / LIST).open("a") as listed:
            listed.write(f"{daemon.pid} {daemon.polite.value} {birth(daemon.pid)}\n")

    def close(self, last_word: str) -> None:
        """End the watchdog; what it does before is in the last word: `done`, nothing, or `end`, what it is for."""
        if self._process is not None:
            self._process.communicate(last_word.encode() + b"\n", timeout=START_SECONDS_MAX)
            self._process = None


class Home:
    """The folder and the processes of one test session, of a parallel run, or of `up`."""

    def __init__(self, folder: Path, *, watched: bool, shared: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for way in (folder.parent, folder):
            open_to_all(way)
        self.folder = folder
        self.daemons: list[Daemon] = []
        self._watchdog = Watchdog(folder) if watched else None
        self._shared = shared

    def room(self, name: str) -> Path:
        """A new folder for a server's data."""
        number, folder = 2, self.folder / name
        while folder.exists():
            number, folder = number + 1, self.folder / f"{name}-{number}"
        folder.mkdir()
        open_to_all(folder)
        return folder

    def keep(self, daemon: Daemon) -> Daemon:
        """Start it, and see to it that it ends no later than this session."""
        daemon.started = self._watch
        self.daemons.append(daemon)
        daemon.start()
        return daemon

    def _watch(self, daemon: Daemon) -> None:
        if self._watchdog is None:
            return
        if not self._shared:
            self._watchdog.start()
        self._watchdog.watch(daemon)

    def close(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.end()
        if self._watchdog is not None:
            self._watchdog.close("done")
        shutil.rmtree(self.folder, ignore_errors=True)
