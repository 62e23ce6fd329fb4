"""`onefold trace` at the terminal and in a pipe: what it prints, how it ends, and the picture that it draws."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner, Result

from onefold.cli.app import app
from onefold.trace import digest, line_database, report
from onefold.trace.lines import Line
from tests.support import PATIENCE

NOON = 1_794_744_000
SVG = "{http://www.w3.org/2000/svg}"


def line(hop: str, key: str, minute: float, **facts: Any) -> str:
    return json.dumps({"ts": NOON + minute * 60, "hop": hop, "key": digest(key), **facts})


CLEAN = [
    line("app", "a", 0, delivery="m1", producer="p"),
    line("gateway", "a", 1, delivery="m1", request="r1"),
    line("worker", "a", 2, delivery="m1", request="r1"),
]
LEAKING = [*CLEAN, line("gateway", "b", 61, delivery="m2", request="r2"), line("worker", "c", 62, request="r2")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log(folder: Path, lines: list[str], name: str = "hops.jsonl") -> str:
    (folder / name).write_text("".join(f"{one}\n" for one in lines))
    return name


def trace(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments], **options)


def test_a_clean_log_ends_with_0(here: Path) -> None:
    said = trace(log(here, CLEAN))

    assert said.exit_code == 0
    assert said.stderr == "onefold: 3 lines from 3 hops, and no key leaks\n"


def test_leaks_are_a_table_by_hour_and_hop_and_end_with_1(here: Path) -> None:
    said = trace(log(here, LEAKING))

    assert said.exit_code == 1
    assert [row.split("\t") for row in said.stdout.splitlines()] == [
        ["hour", "hop", "lines", "keys", "sent", "replaced", "requests", "resent", "reminted"],
        ["2026-11-15 12:00", "app", "1", "1", "1", "0", "0", "0", "0"],
        ["2026-11-15 12:00", "gateway", "1", "1", "0", "0", "0", "0", "0"],
        ["2026-11-15 12:00", "worker", "1", "1", "0", "0", "0", "0", "0"],
        ["2026-11-15 13:00", "gateway", "1", "1", "0", "0", "0", "0", "0"],
        ["2026-11-15 13:00", "worker", "1", "1", "0", "1", "0", "0", "0"],
    ]
    assert said.stderr == f"onefold: worker replaced 1 key, such as message r2 ({digest('b')} became {digest('c')})\n"


def test_a_leak_that_shows_by_delivery_and_by_request_counts_once(here: Path) -> None:
    both = [
        line("gateway", "a", 0, delivery="m", request="r"),
        line("worker", "b", 1, delivery="m", request="r"),
    ]

    said = json.loads(trace(log(here, both), "--format", "json").stdout)

    assert said["leaks"]["replaced"]["count"] == 1


def test_a_request_with_two_keys_at_one_hop_is_no_leak_of_its_producer(here: Path) -> None:
    batch = [line("gateway", "a", 0, request="r"), line("gateway", "b", 0, request="r")]

    assert trace(log(here, batch)).exit_code == 0


def test_json_has_every_number_and_examples(here: Path) -> None:
    said = trace(log(here, LEAKING), "--format", "json")

    found = json.loads(said.stdout)
    assert said.exit_code == 1
    assert (found["clean"], found["lines"], found["hops"]) == (False, 5, ["app", "gateway", "worker"])
    assert found["leaks"]["replaced"] == {
        "count": 1,
        "examples": [
            {
                "hop": "worker",
                "after": "gateway",
                "ts": "2026-11-15T13:02:00Z",
                "id": "r2",
                "had": digest("b"),
                "has": digest("c"),
            }
        ],
    }
    assert found["hours"][-1]["hour"] == "2026-11-15T13:00:00Z"


def test_one_kind_of_leak_can_be_looked_for_alone(here: Path) -> None:
    name = log(here, LEAKING)

    assert trace(name, "--check", "requests").exit_code == 0
    assert trace(name, "--check", "requests", "--check", "replaced").exit_code == 1
    assert list(json.loads(trace(name, "--check", "resent", "--format", "json").stdout)["leaks"]) == ["resent"]


def test_several_logs_one_packed_and_one_from_a_pipe_are_one_trace(here: Path) -> None:
    first, second = log(here, CLEAN[:1]), here / "gateway.jsonl.gz"
    second.write_bytes(gzip.compress(f"{CLEAN[1]}\n".encode()))

    said = trace(first, str(second), "-", "--format", "json", input=f"{line('worker', 'z', 2, delivery='m1')}\n")

    assert json.loads(said.stdout)["leaks"]["replaced"]["count"] == 1


def test_the_order_of_hops_can_be_given_where_clocks_are_apart(here: Path) -> None:
    name = log(here, [line("worker", "b", 0, delivery="m"), line("gateway", "a", 1, delivery="m")])

    assert "gateway replaced" in trace(name).stderr
    assert "worker replaced" in trace(name, "--order", "gateway,worker").stderr


def test_broken_lines_are_told_with_the_first_of_them_and_the_rest_is_examined(here: Path) -> None:
    said = trace(log(here, [CLEAN[0], "broken", "{", '{"level": "info"}', *CLEAN[1:]]))

    assert said.exit_code == 0
    assert "onefold: 2 broken lines left out, the first is line 2 of hops.jsonl: " in said.stderr
    assert "onefold: 1 line about something else left out" in said.stderr
    assert "3 lines from 3 hops" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["."], ".: Is a directory"),
        (["empty.jsonl"], "there is no line of a hop in empty.jsonl: 0 lines broken"),
        (["broken.jsonl"], "The first that cannot be read is line 1 of broken.jsonl: "),
        (["no.gz"], "no.gz: Not a gzipped file"),
        (["cut.gz"], "cut.gz: Compressed file ended"),
        (
            ["hops.jsonl", "--order", "app,wroker"],
            "--order names 'wroker', and the logs have the hops app, gateway, worker",
        ),
        (["hops.jsonl", "--svg", "no/such/folder.svg"], "no/such/folder.svg: No such file or directory"),
        (["hops.jsonl", "--svg", "."], ".: Is a directory"),
        (["hops.jsonl", "missing.jsonl"], "missing.jsonl: No such file or directory"),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_ends_with_2(here: Path, arguments: list[str], told: str) -> None:
    log(here, CLEAN)
    log(here, [], "empty.jsonl")
    log(here, ["no JSON at all"], "broken.jsonl")
    (here / "no.gz").write_bytes(b"plain text\n")
    (here / "cut.gz").write_bytes(gzip.compress(f"{CLEAN[0]}\n".encode())[:-12])

    said = trace(*arguments)

    assert said.exit_code == 2
    assert said.stdout == ""
    assert told in said.stderr
    assert said.stderr.count("\n") == 1


def test_ids_in_the_place_of_hops_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "HOPS_MAX", 10)

    said = trace(log(here, [line(f"request-{number}", "a", 0) for number in range(11)]))

    assert said.exit_code == 2
    assert "more than 10 hops, such as 'request-9': a hop is the name of a place" in said.stderr


def test_an_id_that_is_shared_by_everything_is_told_and_takes_no_memory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_database, "SEEN_MAX", 10)

    said = trace(log(here, [line("app", f"k{number}", number, delivery="0") for number in range(50)]))

    assert said.exit_code == 1
    assert "0 has too many keys to be the id of one message" in said.stderr
    assert "app minted 9 new keys" in said.stderr


def test_the_picture_says_everything_without_colour(here: Path) -> None:
    trace(log(here, LEAKING), "--svg", "leaks.svg")

    drawn = ET.parse(here / "leaks.svg").getroot()
    titles = [one.text for one in drawn.iter(f"{SVG}title")]
    assert drawn.get("role") == "img"
    assert drawn.get("aria-labelledby") == "title description"
    assert titles[0] == "Key leaks by hop and hour"
    assert drawn.find(f"{SVG}desc").text == "5 lines from the hops app, gateway, worker. worker: 1 key replaced."  # type: ignore[union-attr]
    assert "2026-11-15 13:00: 1 line, 1 leak" in titles
    texts = {one.text for one in drawn.iter(f"{SVG}text")}
    assert {"app", "gateway", "worker", "1 key replaced", "no leaks"} <= texts
    # A mark and a hatching, for those who see no red.
    assert len(list(drawn.iter(f"{SVG}path"))) == 1
    assert drawn.find(f".//{SVG}pattern") is not None


def test_names_from_a_log_cannot_break_the_picture_or_the_terminal(here: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[31m"

    said = trace(log(here, [line(evil, "a", 0), line(evil, "b", 1)]), "--svg", "leaks.svg")

    text = (here / "leaks.svg").read_text()
    assert said.exit_code == 0
    assert "<script>" not in text
    assert "\x1b" not in said.stdout + text
    ET.fromstring(text)


def test_a_picture_of_a_long_time_has_a_bar_for_several_hours(here: Path) -> None:
    trace(log(here, [line("app", f"k{day}", day * 1440) for day in range(60)]), "--svg", "leaks.svg")

    text = (here / "leaks.svg").read_text()
    assert "Each bar is 15 hours" in text
    assert text.count('class="lines"') <= 96


def test_ctrl_c_ends_it_cleanly_and_leaves_nothing_behind(here: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(here)}
    command = [sys.executable, "-c", "from onefold.cli import main; main()", "trace", "-"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        # More than it reads at a time: once it takes the rest, it is at work.
        child.stdin.write(f"{CLEAN[0]}\n".encode() * 50_000)
        child.stdin.flush()
        child.send_signal(signal.SIGINT)
        said, complaint = child.communicate(timeout=PATIENCE)

    assert child.returncode == 130
    assert said == b""
    assert b"Traceback" not in complaint
    assert list(here.glob("onefold-trace-*")) == []


def test_a_hop_that_logs_the_key_itself_is_named_accused_of_nothing_else_and_the_key_is_not_printed(here: Path) -> None:
    raw = json.dumps({"ts": NOON + 60, "hop": "worker", "key": "pay-0", "delivery": "m1"})
    name = log(here, [*CLEAN, raw])

    said, found = trace(name), trace(name, "--format", "json")

    assert said.exit_code == 0
    assert (
        "onefold: 1 broken line left out, the first is line 4 of hops.jsonl: the key at worker is not a dig"
        in said.stderr
    )
    assert "onefold: worker wrote 1 key that is not a digest: it has to log onefold.trace.digest(key)" in said.stderr
    assert json.loads(found.stdout)["broken"]["not_digests"] == {"worker": 1}
    assert "replaced" not in said.stderr
    assert "pay-0" not in said.output + found.output


def test_a_hop_that_writes_digests_in_capitals_has_replaced_nothing(here: Path) -> None:
    capitals = json.dumps({"ts": NOON + 120, "hop": "worker", "key": digest("a").upper(), "delivery": "m1"})

    assert trace(log(here, [*CLEAN[:2], capitals])).exit_code == 0


def test_one_of_something_is_said_in_the_singular(here: Path) -> None:
    again = [line("app", "a", 0, delivery="m1", producer="p"), line("app", "a", 1, delivery="m1", producer="q")]
    keys = [line("gateway", "b", 0, delivery="m2"), line("gateway", "c", 1, delivery="m2")]

    said = trace(log(here, [*again, *keys])).stderr

    assert "app sent 2 times, with 1 distinct key: 1 sent again, 1 of them by another instance" in said
    assert "gateway minted 1 new key for messages that had one" in said
    assert trace(log(here, CLEAN[:1], "one.jsonl")).stderr == "onefold: 1 line from 1 hop, and no key leaks\n"


def test_a_log_that_is_named_twice_is_read_once(here: Path) -> None:
    name = log(here, CLEAN)

    said = trace(name, name)

    assert said.exit_code == 0
    assert said.stderr == "onefold: 3 lines from 3 hops, and no key leaks\n"


def test_a_picture_that_cannot_be_drawn_does_not_hide_the_report(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "leaks.svg")

    name = log(here, CLEAN)
    monkeypatch.setattr(Path, "write_text", full)
    said = trace(name, "--svg", "leaks.svg")

    assert said.exit_code == 2
    assert said.stdout.startswith("hour\thop\t")
    assert "leaks.svg: No space left on device. The picture was not drawn" in said.stderr


def test_where_the_disk_is_full_the_folder_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_database, "_SETTINGS", (*line_database._SETTINGS, "max_page_count = 8"))

    said = trace(log(here, [line("app", f"key-{number}", 0) for number in range(5_000)]))

    assert said.exit_code == 2
    assert said.stderr.startswith(f"onefold: sorting in {tempfile.gettempdir()} failed: database or disk is full")
    assert "TMPDIR" in said.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a file as long as it is open")
def test_a_process_that_is_killed_leaves_nothing_large_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with line_database.LineDatabase() as lines:
        lines.add([Line("app", digest("a"), NOON)])

        assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
        assert len(list(lines.hours())) == 1


def test_the_rows_are_whole_in_a_pipe(here: Path) -> None:
    said = trace(log(here, LEAKING))

    assert all(len(re.split("\t", row)) == 9 for row in said.stdout.splitlines())
    assert "\x1b" not in said.stdout
