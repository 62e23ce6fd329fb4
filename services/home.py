"""Where servers live: a folder that their users can reach, and who ends them if nobody else does.

A home of a test session has a watchdog; a home of `python -m services up` has none, for its servers stay.
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


class Home:
    """The folder and the processes of one test session, or of `up`."""

    def __init__(self, folder: Path, *, watched: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for way in (folder.parent, folder):
            open_to_all(way)
        self.folder = folder
        self.daemons: list[Daemon] = []
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._watched = watched

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
        if not self._watched:
            return
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-m", "services.watchdog", self.folder],
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        self._tell(f"{daemon.pid} {daemon.polite.value} {birth(daemon.pid)}")

    def _tell(self, line: str) -> None:
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(line.encode() + b"\n")
        self._watchdog.stdin.flush()

    def close(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.end()
        if self._watchdog is not None:
            self._tell("done")
            self._watchdog.communicate(timeout=START_SECONDS_MAX)
            self._watchdog = None
        shutil.rmtree(self.folder, ignore_errors=True)
