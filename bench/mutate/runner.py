"""Run the tests of a broken module in a copy of the project, which nobody else uses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[2]
COPIED: Final = ("src", "tests", "services", "bench", "docs", "examples", "ops", "pyproject.toml", "README.md")
PASSED, FAILED = 0, 1


class Verdict(Enum):
    """What the tests said of a break."""

    NOTICED = "noticed"
    # A test that waits for ever has noticed it, too.
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


class Red(Exception):
    """The tests fail without any break: what they say of one would mean nothing."""


class Copy:
    """A copy of the project whose sources can be broken."""

    def __init__(self, folder: Path, seconds_max: float) -> None:
        self.folder = folder
        self._seconds_max = seconds_max

    def check_green(self, tests: tuple[str, ...]) -> None:
        """Raise `Red` unless these tests pass as they are."""
        code, output = self._run(tests)
        if code != PASSED:
            raise Red(f"{' '.join(tests)} ended with {code} before anything was broken:\n{output[-4000:]}")

    def judge(self, module: Path, broken: str, tests: tuple[str, ...]) -> Verdict:
        """Run the tests with one broken module, and mend it again."""
        path = self.folder / module
        whole = path.read_text(encoding="utf-8")
        path.write_text(broken, encoding="utf-8")
        try:
            code, _ = self._run(tests)
        finally:
            path.write_text(whole, encoding="utf-8")
        if code is None:
            return Verdict.TIMED_OUT
        return Verdict.SURVIVED if code == PASSED else Verdict.NOTICED

    def _run(self, tests: tuple[str, ...]) -> tuple[int | None, str]:
        """Return pytest's exit code, None after a time-out, and what it printed."""
        process = subprocess.Popen(
            [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder / "src")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._seconds_max)
        except subprocess.TimeoutExpired:
            # Its servers have a watchdog, which ends them when the tests are gone.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        return process.returncode, output


@contextmanager
def copied(seconds_max: float) -> Iterator[Copy]:
    """Copy the project, and remove the copy at the end."""
    with tempfile.TemporaryDirectory(prefix="onefold-mutate-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "project"
        folder.mkdir()
        # PostgreSQL runs as another user, and has to get in.
        Path(name).chmod(0o755)
        for part in COPIED:
            source = PROJECT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
        yield Copy(folder, seconds_max)
