"""Runs one command, and ends everything that it has started when it ends or when somebody ends this process.

Patroni gives its PostgreSQL away, as a daemon does: the processes would belong to the system, and outlive a kill. Here
they become children of this process instead (a child subreaper of Linux), so that `Daemon` finds, freezes and kills
them. A copy of this file runs under the system's Python: it may import nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

# From <linux/prctl.h>.
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    command = subprocess.Popen(sys.argv[1:])
    try:
        while True:
            ended, status = os.wait()
            if ended == command.pid:
                return os.waitstatus_to_exitcode(status)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()


def end_children() -> None:
    """Kill whatever is left. The children of a child that has died are ours: the last of them is the end."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(main())
