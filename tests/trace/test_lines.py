"""Logs are read to the last line: what is broken is counted, what is of others is left out, memory is bounded."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from onefold.trace import lines
from onefold.trace.lines import Line, Tally, read

NOON = 1_794_744_000
KEY = "a1b2c3d4e5f60718"


def line(**facts: Any) -> str:
    return json.dumps({"ts": NOON, "hop": "app", "key": KEY, **facts})


def of(tmp_path: Path, text: str | bytes, name: str = "hops.jsonl") -> tuple[list[Line], Tally]:
    path, tally = tmp_path / name, Tally()
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return [one for portion in read([str(path)], tally) for one in portion], tally


def test_a_line_of_a_hop_is_read_and_the_rest_of_it_ignored(tmp_path: Path) -> None:
    found, tally = of(tmp_path, line(delivery="m", request=7, producer="p", scope="t", level="info", extra=[1]) + "\n")

    assert found == [Line(hop="app", key=KEY, ts=NOON, scope="t", delivery="m", request=7, producer="p")]
    assert tally == Tally(lines=1)


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (NOON, NOON),
        (NOON + 0.25, NOON + 0.25),
        ("2026-11-15T12:00:00Z", NOON),
        ("2026-11-15T12:00:00", NOON),
        ("2026-11-15T14:00:00.5+02:00", NOON + 0.5),
    ],
)
def test_a_time_is_seconds_or_iso_8601(tmp_path: Path, written: object, read_as: float) -> None:
    (found,), _ = of(tmp_path, line(ts=written))

    assert found.ts == read_as


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        '{"ts": 1, "hop": "app"',
        line(ts=NOON * 1000),
        line(ts="yesterday"),
        line(ts="1969-12-31T23:59:59Z"),
        line(ts="0001-01-01T00:00:00+14:00"),
        line(ts="9999-12-31T23:59:59-12:00"),
        line(delivery=2**63),
        line(request=-(2**70)),
        line(ts=-1),
        line(key=""),
        line(hop=None),
        line(key=17),
        line(key="pay_7f3a"),
        f'{{"hop": "app", "key": "{KEY}"}}',
        "[1, 2]",
    ],
)
def test_a_broken_line_is_counted_and_its_number_kept(tmp_path: Path, text: str) -> None:
    found, tally = of(tmp_path, f"{line()}\n\n{text}\n{line()}\n{text}\n")

    assert len(found) == 2
    assert (tally.lines, tally.broken, tally.blank) == (2, 2, 1)
    assert tally.first is not None
    assert (tally.first.number, tally.first.file) == (3, str(tmp_path / "hops.jsonl"))


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path: Path) -> None:
    _, tally = of(tmp_path, line().encode() + b"\n\xff\xfe{}\n" + b'{"hop": "\xff"}\n')

    assert (tally.lines, tally.broken + tally.others) == (1, 2)


@pytest.mark.parametrize(
    "text",
    [
        '{"hop": "app", "x": ' + "[" * 50_000 + "]" * 50_000 + "}",
        line()[:-1] + ', "x": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}",
        '{"a":' * 50_000,
    ],
    ids=["no hop's", "a hop's", "without an end"],
)
def test_a_line_that_is_nested_too_deeply_is_broken_and_the_rest_is_read(tmp_path: Path, text: str) -> None:
    found, tally = of(tmp_path, "\n".join([line(), text, line(hop="worker")]))

    assert [one.hop for one in found] == ["app", "worker"]
    assert (tally.lines, tally.broken) == (2, 1)
    assert tally.first is not None
    assert (tally.first.number, tally.first.why) == (2, "it is nested too deeply")


def test_lines_of_others_in_the_same_log_are_counted_apart(tmp_path: Path) -> None:
    found, tally = of(tmp_path, f'{{"level": "info", "message": "started"}}\n{line()}\n')

    assert len(found) == 1
    assert (tally.others, tally.broken) == (1, 0)


def test_what_a_logger_writes_before_the_line_is_left_out(tmp_path: Path) -> None:
    found, tally = of(tmp_path, f"2026-11-15 12:00:00,123 INFO onefold.hops {line()}\n")

    assert len(found) == 1
    assert tally.broken == 0


def test_what_is_said_of_a_prefix_with_a_brace_tells_what_to_change(tmp_path: Path) -> None:
    _, tally = of(tmp_path, f"{line()}\n[{{pid 7}}] {line()}\n")

    assert (tally.lines, tally.broken) == (1, 1)
    assert tally.first is not None
    assert "what follows its first { is not JSON" in tally.first.why
    assert "must not write a { before the line" in tally.first.why


@pytest.mark.parametrize("digits", [12, 16, 64])
def test_a_digest_in_capitals_is_the_same_digest(tmp_path: Path, digits: int) -> None:
    digest = (KEY * 4)[:digits]

    found, tally = of(tmp_path, f"{line(key=digest.upper())}\n{line(key=digest)}\n")

    assert [one.key for one in found] == [digest, digest]
    assert tally.broken == 0


@pytest.mark.parametrize(
    "key",
    [
        "pay_7f3a",
        KEY[:11],
        KEY * 4 + "0",
        f"{KEY}\n",
        KEY.replace("a", "\u0661"),
        "6f1c2a9e-0d3b-4c55-9d8e-000000000000",
    ],
)
def test_what_is_no_digest_is_broken_its_hop_is_counted_and_it_is_in_no_message(tmp_path: Path, key: str) -> None:
    found, tally = of(tmp_path, f"{line(hop='worker', key=key)}\n{line()}\n{line(hop='worker', key=key)}\n")

    assert [one.hop for one in found] == ["app"]
    assert (tally.broken, tally.not_digests) == (2, {"worker": 2})
    assert tally.first is not None
    assert tally.first.why == "the key at worker is not a digest (12 to 64 hexadecimal digits)"


def test_the_hops_that_write_no_digests_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "HOPS_MAX", 2)

    _, tally = of(tmp_path, "".join(f"{line(hop=f'hop-{number}', key='raw')}\n" for number in range(9)))

    assert tally.not_digests == {"hop-0": 1, "hop-1": 1, "others": 7}


def test_the_last_line_needs_no_end_and_windows_may_end_them(tmp_path: Path) -> None:
    found, tally = of(tmp_path, f"{line()}\r\n{line()}")

    assert len(found) == tally.lines == 2


def test_lines_that_are_cut_by_a_portion_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{line(delivery=f'm{number}')}\n" for number in range(50))
    for size in (1, 7, 60, 61, 62, 1_000):
        monkeypatch.setattr(lines, "CHUNK", size)

        found, tally = of(tmp_path, text)

        assert [one.delivery for one in found] == [f"m{number}" for number in range(50)]
        assert tally == Tally(lines=50)


def test_the_number_of_a_broken_line_is_right_in_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK", 200)

    _, tally = of(tmp_path, f"{line()}\n" * 40 + "broken\n" + f"{line()}\n" * 40)

    assert (tally.lines, tally.broken) == (80, 1)
    assert tally.first is not None
    assert tally.first.number == 41


def test_a_line_without_an_end_is_never_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK", 64)
    monkeypatch.setattr(lines, "LINE_MAX", 256)
    # What is left of it must not look like a line.
    long = line(key="x" * 5_000)

    found, tally = of(tmp_path, f"{line()}\n{long}\n{line()}\n{long}")

    assert len(found) == 2
    assert tally.broken == 2
    assert tally.first is not None
    assert tally.first.number == 2


def test_a_file_without_any_line_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK", 1 << 16)
    monkeypatch.setattr(lines, "LINE_MAX", 1 << 16)
    path, tally = tmp_path / "core.dump", Tally()
    path.write_bytes(bytes(8 << 20))

    tracemalloc.start()
    found = list(read([str(path)], tally))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found == [[]]
    assert tally.broken == 1
    assert peak < 1 << 20


def test_a_packed_log_is_unpacked(tmp_path: Path) -> None:
    found, _ = of(tmp_path, gzip.compress(f"{line()}\n".encode() * 3), "hops.jsonl.gz")

    assert len(found) == 3


def test_progress_is_told_in_bytes_over_all_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(f"{line()}\n")
    told: list[int] = []

    for _ in read([str(file) for file in files], Tally(), told.append):
        pass

    size = files[0].stat().st_size
    assert told == [size, 2 * size]
