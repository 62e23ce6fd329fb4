"""The two incidents of keys, in a log of a million lines: found exactly, in bounded memory.

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

MESSAGES = 307_000
LINES = 1_000_400

# A quarter of a second between two messages: some 21 hours.
BEGIN, STEP = 1_794_700_800.0, 0.25

# From message to message: the hours in which the worker has the wrong key. Every tenth message is tried twice.
SKEW = range(100_000, 140_000)
RETRIED = 10

# The batch that the second instance sends again, and the part of it for which it mints new keys.
RESENT = range(200_000, 205_000)
REMINTED = range(205_000, 206_000)

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


def lines() -> Iterator[str]:
    """A day of three hops. Retries of clients keep their request id, but for the hours of the skew."""
    for number in range(MESSAGES):
        ts, key, message, request = BEGIN + number * STEP, digest(f"key-{number}"), f"msg-{number}", f"req-{number}"
        producer = "app-1" if number < RESENT.start else "app-2"
        yield f'{{"ts":{ts},"hop":"app","key":"{key}","delivery":"{message}","producer":"{producer}"}}\n'
        yield from passed(ts, key, message, request, skewed=number in SKEW)
        if number % RETRIED == 0:
            again = f"{request}-again" if number in SKEW else request
            yield from passed(ts + 5, key, message, again, skewed=number in SKEW)
    for number in (*RESENT, *REMINTED):
        ts, key = BEGIN + MESSAGES * STEP, digest(f"{'new' if number in REMINTED else 'key'}-{number}")
        yield f'{{"ts":{ts},"hop":"app","key":"{key}","delivery":"msg-{number}","producer":"app-3"}}\n'
        yield from passed(ts, key, f"msg-{number}", f"req-{number}-restart", skewed=False, gateway="relay")


def passed(ts: float, key: str, message: str, request: str, *, skewed: bool, gateway: str = "gateway") -> Iterator[str]:
    seen = digest(request) if skewed else key
    yield f'{{"ts":{ts + 0.1},"hop":"{gateway}","key":"{key}","delivery":"{message}","request":"{request}"}}\n'
    yield f'{{"ts":{ts + 0.2},"hop":"worker","key":"{seen}","delivery":"{message}","request":"{request}"}}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log, and what the command says of it."""
    folder = tmp_path_factory.mktemp("incidents")
    with (folder / "hops.jsonl").open("w", encoding="ascii") as log:
        log.writelines(lines())
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


def test_every_line_is_accounted_for(report: dict[str, Any]) -> None:
    assert report["lines"] == sum(cell["lines"] for cell in report["hours"]) == LINES
    assert report["broken"]["count"] == report["others"] == 0


def test_the_hop_that_replaced_keys_is_named_with_the_hours(report: dict[str, Any]) -> None:
    replaced = len(SKEW) + len(SKEW) // RETRIED

    assert report["leaks"]["replaced"]["count"] == count(report, "replaced", "worker") == replaced
    # 40,000 messages, four of them a second.
    assert hours_of(report, "replaced", "worker") == [f"2026-11-15T0{hour}:00:00Z" for hour in (6, 7, 8, 9)]
    example = report["leaks"]["replaced"]["examples"][0]
    assert (example["hop"], example["after"], example["id"]) == ("worker", "gateway", f"msg-{SKEW.start}")
    assert (example["had"], example["has"]) == (digest(f"key-{SKEW.start}"), digest(f"req-{SKEW.start}"))


def test_keys_with_more_than_one_request_are_found(report: dict[str, Any]) -> None:
    assert count(report, "requests", "gateway") == len(SKEW) // RETRIED
    # After the restart the worker has another request id for what was sent again.
    assert count(report, "requests", "worker") == len(RESENT)
    example = next(one for one in report["leaks"]["requests"]["examples"] if one["hop"] == "gateway")
    assert len(example["requests"]) == 2


def test_the_restart_shows_as_more_that_was_sent_than_there_are_keys(report: dict[str, Any]) -> None:
    sent, resent = count(report, "sent", "app"), count(report, "resent", "app")

    assert sent == MESSAGES + len(RESENT) + len(REMINTED)
    assert resent == count(report, "restarted", "app") == len(RESENT)
    assert sent - resent == MESSAGES + len(REMINTED)


def test_messages_that_got_a_new_key_from_their_producer_are_found(report: dict[str, Any]) -> None:
    assert report["leaks"]["reminted"]["count"] == count(report, "reminted", "app") == len(REMINTED)
    assert report["leaks"]["reminted"]["examples"][0]["id"] == f"msg-{REMINTED.start}"


def test_a_person_is_told_in_sentences(folder: Path) -> None:
    said = (folder / "said.txt").read_text()

    assert "onefold: worker replaced 44,000 keys, such as message msg-100000 " in said
    assert "onefold: gateway gave 4,000 keys more than one request id" in said
    assert "313,000 times, with 308,000 distinct keys: 5,000 sent again, 5,000 of them by another instance" in said
    assert "onefold: app minted 1,000 new keys for messages that had one" in said


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux")
def test_a_million_lines_are_examined_in_bounded_memory(folder: Path) -> None:
    assert int((folder / "peak").read_text()) * 1024 < MEMORY_MAX
