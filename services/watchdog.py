"""Ends the servers of a test session that died without ending them itself.

Each line of its input is `pid signal birth`. At the end of the input, which is the end of the session however it came,
it sends each of them its signal, SIGKILL to what is left, and removes the session's folder. A line `done` tells it
that there is nothing to do: the session's own children may keep the other end of the input open.
"""

from __future__ import annotations

import shutil
import signal
import sys

from services.processes import ServerFailed, birth, signal_one, wait_until

SECONDS_TO_END = 5.0


def main() -> None:
    folder, processes = sys.argv[1], []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        pid, number, born = line.rstrip("\n").split(" ", 2)
        processes.append((int(pid), signal.Signals(int(number)), born))
    left = [(pid, number, born) for pid, number, born in processes if birth(pid) == born]
    for pid, number, _ in reversed(left):
        signal_one(pid, signal.SIGCONT)
        signal_one(pid, number)
    try:
        wait_until(lambda: all(birth(pid) != born for pid, _, born in left), "the servers do not end", SECONDS_TO_END)
    except ServerFailed:
        for pid, _, born in left:
            if birth(pid) == born:
                signal_one(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
