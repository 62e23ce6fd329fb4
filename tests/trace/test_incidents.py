"""The two incidents of keys, in a log of a day: found exactly, in bounded memory.

Key skew: from one hour on the worker takes the gateway's request id for the key, and each retry of a client runs.
Restart: a producer dies in the middle of a batch; the new instance sends it again, and a part of it under new keys.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold.trace import digest

BEGIN = 1_794_700_800.0

# Every tenth message is tried twice.
RETRIED = 10


class Day:
    """Some 21 hours of messages: a million lines, or a part of that in the same hours."""

    def __init__(self, part: int) -> None:
        self.messages, self.lines, self.step = 307_000 // part, 1_000_400 // part, 0.25 * part
        # From message to message: the hours in which the worker has the wrong key.
        self.skew = range(100_000 // part, 140_000 // part)
        # The batch that the second instance sends again, and the part of it for which it mints new keys.
        self.resent = range(200_000 // part, 205_000 // part)
        self.reminted = range(205_000 // part, 206_000 // part)


# Python with all that the command imports takes some 60 MB, the sorting 32. A set of a million ids takes 130 and more.
MEMORY_MAX = 200 << 20

MEASURED = """
import re, sys
from pathlib import Path
from onefold.cli import main

try:
    main()
finally:
    # Of this program alone: what getrusage says begins with the memory of the process that started it.
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    Path("peak").write_text(peak[1])
"""


def lines(day: Day) -> Iterator[str]:
    """A day of three hops. Retries of clients keep their request id, but for the hours of the skew."""
    for number in range(day.messages):
        ts, key, message, request = BEGIN + number * day.step, digest(f"key-{number}"), f"msg-{number}", f"req-{number}"
        producer = "app-1" if number < day.resent.start else "app-2"
        yield f'{{"ts":{ts},"hop":"app","key":"{key}","delivery":"{message}","producer":"{producer}"}}\n'
        yield from passed(ts, key, message, request, skewed=number in day.skew)
        if number % RETRIED == 0:
            again = f"{request}-again" if number in day.skew else request
            yield from passed(ts + 5, key, message, again, skewed=number in day.skew)
    for number in (*day.resent, *day.reminted):
        ts, key = BEGIN + day.messages * day.step, digest(f"{'new' if number in day.reminted else 'key'}-{number}")
        yield f'{{"ts":{ts},"hop":"app","key":"{key}","delivery":"msg-{number}","producer":"app-3"}}\n'
        yield from passed(ts, key, f"msg-{number}", f"req-{number}-restart", skewed=False, gateway="relay")


def passed(ts: float, key: str, message: str, request: str, *, skewed: bool, gateway: str = "gateway") -> Iterator[str]:
    seen = digest(request) if skewed else key
    yield f'{{"ts":{ts + 0.1},"hop":"{gateway}","key":"{key}","delivery":"{message}","request":"{request}"}}\n'
    yield f'{{"ts":{ts + 0.2},"hop":"worker","key":"{seen}","delivery":"{message}","request":"{request}"}}\n'


@pytest.fixture(scope="module", params=[10, pytest.param(1, marks=pytest.mark.more, id="a million lines")])
def day(request: pytest.FixtureRequest) -> Day:
    return Day(request.param)


@pytest.fixture(scope="module")
def folder(day: Day, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log, and what the command says of it."""
    folder = tmp_path_factory.mktemp("incidents")
    with (folder / "hops.jsonl").open("w", encoding="ascii") as log:
        log.writelines(lines(day))
    command = [sys.executable, "-c", MEASURED, "trace", "hops.jsonl", "--format", "json", "--svg", "leaks.svg"]
    ended = subprocess.run(command, cwd=folder, check=False, timeout=900, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    (folder / "report.json").write_text(ended.stdout)
    (folder / "said.txt").write_text(ended.stderr)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def hours_of(report: dict[str, Any], kind: str, hop: str) -> list[str]:
    """The hours in which this leaked at this hop."""
    return [cell["hour"] for cell in report["hours"] if cell[kind] and cell["hop"] == hop]


def count(report: dict[str, Any], kind: str, hop: str) -> int:
    return sum(cell[kind] for cell in report["hours"] if cell["hop"] == hop)


def test_every_line_is_accounted_for(report: dict[str, Any], day: Day) -> None:
    assert report["lines"] == sum(cell["lines"] for cell in report["hours"]) == day.lines
    assert report["broken"]["count"] == report["others"] == 0


def test_the_hop_that_replaced_keys_is_named_with_the_hours(report: dict[str, Any], day: Day) -> None:
    replaced = len(day.skew) + len(day.skew) // RETRIED

    assert report["leaks"]["replaced"]["count"] == count(report, "replaced", "worker") == replaced
    # 40,000 messages, four of them a second, or a part of that.
    assert hours_of(report, "replaced", "worker") == [f"2026-11-15T0{hour}:00:00Z" for hour in (6, 7, 8, 9)]
    example = report["leaks"]["replaced"]["examples"][0]
    assert (example["hop"], example["after"], example["id"]) == ("worker", "gateway", f"msg-{day.skew.start}")
    assert (example["had"], example["has"]) == (digest(f"key-{day.skew.start}"), digest(f"req-{day.skew.start}"))


def test_keys_with_more_than_one_request_are_found(report: dict[str, Any], day: Day) -> None:
    assert count(report, "requests", "gateway") == len(day.skew) // RETRIED
    # After the restart the worker has another request id for what was sent again.
    assert count(report, "requests", "worker") == len(day.resent)
    example = next(one for one in report["leaks"]["requests"]["examples"] if one["hop"] == "gateway")
    assert len(example["requests"]) == 2


def test_the_restart_shows_as_more_that_was_sent_than_there_are_keys(report: dict[str, Any], day: Day) -> None:
    sent, resent = count(report, "sent", "app"), count(report, "resent", "app")

    assert sent == day.messages + len(day.resent) + len(day.reminted)
    assert resent == count(report, "restarted", "app") == len(day.resent)
    assert sent - resent == day.messages + len(day.reminted)


def test_messages_that_got_a_new_key_from_their_producer_are_found(report: dict[str, Any], day: Day) -> None:
    assert report["leaks"]["reminted"]["count"] == count(report, "reminted", "app") == len(day.reminted)
    assert report["leaks"]["reminted"]["examples"][0]["id"] == f"msg-{day.reminted.start}"


def test_a_person_is_told_in_sentences(folder: Path, day: Day) -> None:
    said = (folder / "said.txt").read_text()

    retried, resent, reminted = len(day.skew) // RETRIED, len(day.resent), len(day.reminted)
    keys = day.messages + reminted
    assert f"onefold: worker replaced {len(day.skew) + retried:,} keys, such as message msg-{day.skew.start} " in said
    assert f"onefold: gateway gave {retried:,} keys more than one request id" in said
    assert (
        f"{keys + resent:,} times, with {keys:,} distinct keys: {resent:,} sent again, {resent:,} of them by " in said
    )
    assert f"onefold: app minted {reminted:,} new keys for messages that had one" in said


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux")
def test_they_are_examined_in_bounded_memory(folder: Path) -> None:
    assert int((folder / "peak").read_text()) * 1024 < MEMORY_MAX
