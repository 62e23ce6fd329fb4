"""Duplicates are written down in batches: each once, from many processes, and nothing for a first delivery."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onefold import Event, Guard, InProgress, UsageError
from onefold.events import Kind
from onefold.keys import address
from onefold.report import Absorbed
from onefold.report.absorbed import WAITING_MAX, Batch, Duplicates, batches
from onefold.testing import Clock


def replayed(key: str = "pay_1", operation: str = "charge", **fields: str) -> Event:
    return Event(kind=Kind.REPLAYED, address=address(operation, key, **fields))


def written(path: Path) -> list[Batch | None]:
    return list(batches([path])) if path.exists() else []


def counted(path: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for batch in written(path):
        assert batch is not None
        found.update({one.key: one.absorbed for one in batch.duplicates})
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "absorbed.jsonl"


def test_every_duplicate_of_every_guard_is_counted_and_no_first_delivery(path: Path) -> None:
    uninstall = Absorbed(path).install()
    for guard in (Guard("memory:"), Guard("memory:")):
        for key in ("pay_1", "pay_1", "pay_2", "pay_1"):
            guard.run("charge", key, lambda: 4200, scope="acme")
    uninstall()
    Guard("memory:").run("charge", "pay_1", lambda: 4200)

    (batch,) = written(path)
    assert batch is not None
    assert batch.duplicates == [Duplicates("charge", "acme", "pay_1", 4, 0)]


def test_a_duplicate_that_comes_while_the_first_runs_is_counted_apart(path: Path) -> None:
    uninstall = Absorbed(path).install()
    guard = Guard("memory:", wait=0)

    def handle() -> None:
        # In another thread, which is not inside this delivery.
        with ThreadPoolExecutor() as threads, pytest.raises(InProgress):
            threads.submit(guard.run, "charge", "pay_1", lambda: None).result()

    guard.run("charge", "pay_1", handle)
    uninstall()

    (batch,) = written(path)
    assert batch is not None
    assert batch.duplicates == [Duplicates("charge", "", "pay_1", 0, 1)]


def test_a_step_that_is_replayed_is_no_duplicate(path: Path) -> None:
    absorbed = Absorbed(path)
    absorbed(Event(kind=Kind.REPLAYED, address=address("charge", "k"), detail="step reserve"))
    absorbed.flush()

    assert written(path) == []


def test_it_writes_once_in_a_while_and_at_the_end(path: Path) -> None:
    clock = Clock(1_000.0)
    absorbed = Absorbed(path, every="10s", clock=clock)
    for _ in range(5):
        absorbed(replayed())
        clock.advance(1.0)
    before = written(path)
    clock.advance(5.0)
    absorbed(replayed())
    after = written(path)
    absorbed(replayed("pay_2"))
    absorbed.flush()

    assert before == []
    assert [batch and batch.duplicates[0].absorbed for batch in after] == [6]
    assert [(batch.begin, batch.end) for batch in written(path) if batch] == [(1_000.0, 1_010.0), (1_010.0, 1_010.0)]
    assert counted(path) == {"pay_1": 6, "pay_2": 1}


def test_no_more_keys_wait_in_memory_than_a_thousand(path: Path) -> None:
    absorbed = Absorbed(path, every="1h")
    for number in range(2 * WAITING_MAX + 10):
        absorbed(replayed(str(number)))

    assert len(written(path)) == 2
    assert len(counted(path)) == 2 * WAITING_MAX


def test_only_its_owner_can_read_the_file(path: Path) -> None:
    absorbed = Absorbed(path)
    absorbed(replayed())
    absorbed.flush()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_line_that_a_killed_process_left_half_written_takes_no_other_with_it(path: Path, left: int) -> None:
    for key in ("pay_1", "pay_2", "pay_3"):
        absorbed = Absorbed(path)
        absorbed(replayed(key))
        absorbed.flush()
        if key == "pay_2":
            whole = path.read_bytes()
            begin = whole.rindex(b"{")
            path.write_bytes(whole[:begin] + whole[begin:].rstrip()[:left])

    found = written(path)

    assert [batch and batch.duplicates[0].key for batch in found] == ["pay_1", None, "pay_3"]


def test_a_process_that_is_killed_in_its_write_loses_its_own_batch_alone(path: Path) -> None:
    for key, limit in (("pay_1", None), ("pay_2", 20), ("pay_3", None)):
        _write_in_a_process(path, key, limit)

    assert [batch and batch.duplicates[0].key for batch in written(path)] == ["pay_1", None, "pay_3"]


def _write_in_a_process(path: Path, key: str, limit: int | None) -> None:
    """Write a batch; with a limit, the kernel takes so many bytes of it, and the process kills itself."""
    program = (
        "import os, resource, signal, sys\n"
        "from tests.report.test_absorbed import Absorbed, replayed\n"
        "absorbed = Absorbed(sys.argv[1])\n"
        "absorbed(replayed(sys.argv[2]))\n"
        "if sys.argv[3:]:\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    limit = os.path.getsize(sys.argv[1]) + int(sys.argv[3])\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "absorbed.flush()\n"
        "if sys.argv[3:]:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    given = [] if limit is None else [str(limit)]
    ended = subprocess.run([sys.executable, "-c", program, str(path), key, *given], check=False)
    assert ended.returncode == (0 if limit is None else -signal.SIGKILL)


@pytest.mark.parametrize(
    "line",
    [
        '{"begin": 1e300, "end": 1e300, "duplicates": []}',
        '{"begin": -1e300, "end": 1, "duplicates": []}',
        '{"begin": 1, "end": 2, "duplicates": [["charge", "", "k", -1, 0]]}',
        '{"begin": 1, "end": 2, "duplicates": [["charge", "", "k", 1, ' + "9" * 400 + "]]}",
    ],
)
def test_a_line_that_no_process_can_have_written_is_not_read(path: Path, line: str) -> None:
    path.write_text(line)

    assert written(path) == [None]


def test_a_file_that_was_rotated_away_is_begun_anew(path: Path) -> None:
    absorbed = Absorbed(path)
    for _ in range(2):
        absorbed(replayed())
        absorbed.flush()
        path.rename(path.with_suffix(".old"))
    absorbed(replayed())
    absorbed.flush()

    assert counted(path) == {"pay_1": 1}


def duplicates_of_a_process(path: Path) -> None:
    absorbed = Absorbed(path)
    for number in range(50):
        absorbed(replayed(str(number)))
        absorbed.flush()


def test_many_processes_share_a_file(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=duplicates_of_a_process, args=[path]) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert counted(path) == {str(number): 3 for number in range(50)}


FORKS = """
import os, sys
from onefold import Guard
from onefold.report import Absorbed
Absorbed(sys.argv[1], every="1h").install()
guard = Guard("memory:")
guard.run("charge", "parent", lambda: 1)
guard.run("charge", "parent", lambda: 1)
if os.fork() == 0:
    guard.run("charge", "parent", lambda: 1)
    sys.exit()
os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_leaves_the_counts_of_its_parent_to_it(path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS, str(path)], check=True, timeout=60)

    assert counted(path) == {"parent": 2}


def test_a_line_that_was_cut_off_hides_no_other(path: Path) -> None:
    absorbed = Absorbed(path)
    absorbed(replayed())
    absorbed.flush()
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"\n" + whole + b"\xff\n" + b"[]\n")

    assert [batch is None for batch in written(path)] == [True, False, True, True]


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        Absorbed(tmp_path / "nowhere" / "absorbed.jsonl")


def test_a_file_that_cannot_be_written_fails_no_delivery(tmp_path: Path) -> None:
    uninstall = Absorbed(tmp_path / "folder.jsonl", every=0).install()
    (tmp_path / "folder.jsonl").mkdir()
    guard = Guard("memory:")
    guard.run("charge", "pay_1", lambda: 4200)

    assert guard.run("charge", "pay_1", lambda: 4200).replayed
    with pytest.raises(OSError, match="folder"):
        (tmp_path / "folder.jsonl").read_bytes()
    uninstall()
