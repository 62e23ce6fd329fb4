"""Ends the servers of a test session that died without ending them itself, and those that the processes of one shared.

The list in the session's folder names them: each of its lines is `pid signal birth`. At the end of the input, which is
the end of the session however it came, or at the line `end` it sends each of them its signal, SIGKILL to what is left,
and removes the session's folder. A line `done` tells it that there is nothing to do. (The lines are needed: the
session's own children may keep the other end of the input open.)
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

from services.home import LIST
from services.processes import ServerFailed, birth, signal_one, wait_until

SECONDS_TO_END = 5.0


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.stdin.readline().strip() == "done":
        return
    left = [(pid, number, born) for pid, number, born in listed(folder) if birth(pid) == born]
    for pid, number, _ in reversed(left):
        signal_one(pid, signal.SIGCONT)
        signal_one(pid, number)
    if not gone(left):
        for pid, _, born in left:
            if birth(pid) == born:
                signal_one(pid, signal.SIGKILL)
        # Whoever still dies might write into the folder.
        gone(left)
    shutil.rmtree(folder, ignore_errors=True)


def gone(processes: list[tuple[int, signal.Signals, str]]) -> bool:
    """Wait a little until they have ended."""
    try:
        wait_until(
            lambda: all(birth(pid) != born for pid, _, born in processes), "the servers do not end", SECONDS_TO_END
        )
    except ServerFailed:
        return False
    return True


def listed(folder: Path) -> list[tuple[int, signal.Signals, str]]:
    path = folder / LIST
    lines = path.read_text().splitlines() if path.exists() else []
    words = (line.split(" ", 2) for line in lines)
    return [(int(pid), signal.Signals(int(number)), born) for pid, number, born in words]


if __name__ == "__main__":
    main()
