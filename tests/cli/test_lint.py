"""`onefold lint`: its exit status, its formats, and one readable line for whatever it is given."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onefold.cli.app import app
from onefold.config import schema
from onefold.lint import RULES
from tests.support import PATIENCE, PROJECT

EXAMPLES = PROJECT / "examples" / "retention"
SEEDS, CORRECTED = str(EXAMPLES / "seeds.yaml"), str(EXAMPLES / "corrected.yaml")

COMMAND = [sys.executable, "-c", "from onefold.cli import main; main()", "lint"]


def onefold(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lint", *arguments])


@pytest.fixture
def broken(tmp_path: Path) -> str:
    path = tmp_path / "broken, or so: 100%.yaml"
    path.write_text("stores: {}\nguards:\n  g: {keep: 7d, kep: 7d}\n")
    return str(path)


def test_findings_are_lines_and_exit_with_1() -> None:
    said = onefold(SEEDS)

    assert said.exit_code == 1
    assert [re.match(r"(.*):\d+:\d+: OF001 guards\.(\w+): ", line)[2] for line in said.stdout.splitlines()] == [  # type: ignore[index]
        "orders",
        "events",
        "inventory",
    ]
    assert said.stderr == "onefold: 3 findings among 5 guards in 1 file\n"


def test_nothing_to_mend_exits_with_0() -> None:
    said = onefold(CORRECTED)

    assert (said.exit_code, said.stdout) == (0, "")
    assert said.stderr == "onefold: 5 guards in 1 file: nothing to fix\n"


def test_the_dead_letter_incident_fails_with_14d_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(
        "stores: {money: {url: '${DATABASE_URL}'}}\n"
        "guards:\n"
        "  payouts:\n"
        "    store: money\n"
        "    keep: 24h\n"
        "    replays: {dead_letter: 7d}\n"
    )

    said = CliRunner(env={"DATABASE_URL": None}).invoke(app, ["lint", str(path)])

    assert said.exit_code == 1
    assert said.stdout.startswith(f"{path}:5:5: OF001 ")
    assert "14d" in said.stdout
    assert "DATABASE_URL is not set" in said.stderr


def test_a_store_that_may_be_of_a_package_that_is_not_here_is_mentioned_and_its_url_is_not(tmp_path: Path) -> None:
    file = tmp_path / "onefold.yaml"
    file.write_text("stores: {money: {url: 'nosuch://secret@x'}}\nguards: {payouts: {store: money}}\n")

    said = CliRunner().invoke(app, ["lint", str(file)])

    assert said.exit_code == 0, said.output
    assert "stores.money.url names a kind of store that is not installed, so it was not checked" in said.stderr
    assert "secret" not in said.output


def test_a_variable_that_hides_no_kind_of_store_is_not_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "onefold.yaml"
    path.write_text(
        "stores: {cache: {url: 'redis://:${NOT_SET_HERE}@cache/0'}}\nguards: {payouts: {store: cache, money: true}}\n"
    )

    said = onefold(str(path))

    assert "OF004" in said.stdout, "it is known to be a Redis"
    assert "NOT_SET_HERE" not in said.stderr


def test_a_file_that_cannot_be_used_exits_with_2_and_the_others_are_linted(broken: str) -> None:
    said = onefold(broken, SEEDS, "missing.yaml")

    assert said.exit_code == 2
    assert said.stdout.count("OF001") == 3
    assert said.stderr.splitlines() == [
        f"onefold: {broken}:3:3: guards.g: 'store' is missing",
        f"onefold: {broken}:3:17: guards.g: 'kep' is not a field: did you mean 'keep'?",
        "onefold: missing.yaml: there is no such file",
    ]


@pytest.mark.parametrize("arguments", [(), ("--format", "json")])
def test_which_file_is_asked(arguments: tuple[str, ...]) -> None:
    said = onefold(*arguments)

    assert said.exit_code == 2
    assert said.stderr == "onefold: which file? Name it: onefold lint onefold.yaml\n"


def test_a_file_that_is_named_twice_is_linted_once() -> None:
    assert onefold(SEEDS, SEEDS).stdout.count("OF001") == 3


def test_as_json(broken: str) -> None:
    said = json.loads(onefold(SEEDS, broken, "--format", "json").stdout)

    assert [one["guard"] for one in said["findings"]] == ["orders", "events", "inventory"]
    first = said["findings"][0]
    assert (first["code"], first["file"], first["column"], first["fix"]) == ("OF001", SEEDS, 5, "Set keep: 48h")
    assert [one["line"] for one in said["problems"]] == [3, 3]
    assert json.loads(onefold(CORRECTED, "--format", "json").stdout)["findings"] == []


def test_settings_that_were_read_are_listed_for_programs(tmp_path: Path) -> None:
    path, settings = tmp_path / "onefold.yaml", tmp_path / "topic.properties"
    settings.write_text("# the topic\nretention.ms=-1\ndelivery.timeout.ms=120000\n")
    path.write_text(
        "stores: {d: {url: 'sqlite:///d.db'}}\nguards: {pay: {store: d, keep: forever, settings: topic.properties}}\n"
    )

    said = onefold(str(path), "--format", "json")

    assert said.exit_code == 0
    assert json.loads(said.stdout)["settings"] == [
        {
            "guard": "pay",
            "name": "delivery.timeout.ms",
            "role": "duplicates",
            "seconds": 120.0,
            "file": str(settings),
            "line": 3,
        },
        {
            "guard": "pay",
            "name": "retention.ms",
            "role": "replays",
            "seconds": None,
            "file": str(settings),
            "line": 2,
        },
    ]


def test_settings_that_cannot_be_used_exit_with_2_and_one_line(tmp_path: Path) -> None:
    path, settings = tmp_path / "onefold.yaml", tmp_path / "queue.json"
    settings.write_text('{"Attributes": {\n  "VisibilityTimeout": "soon"}}')
    path.write_text("stores: {d: {url: 'sqlite:///d.db'}}\nguards: {pay: {store: d, settings: queue.json}}\n")

    said = onefold(str(path))

    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr == (
        f"onefold: {settings}:2: guards.pay: VisibilityTimeout is 'soon', which is not a whole number of seconds\n"
    )
    (problem,) = json.loads(onefold(str(path), "--format", "json").stdout)["problems"]
    assert (problem["file"], problem["line"]) == (str(settings), 2)


def test_a_strict_lint_asks_for_a_documented_floor() -> None:
    said = onefold(CORRECTED, "--strict")

    assert said.exit_code == 1
    assert re.findall(r"OF\d+ guards\.\w+", said.stdout) == ["OF019 guards.notifications"]


def test_as_commands_for_github(broken: str) -> None:
    lines = onefold(SEEDS, broken, "--format", "github").stdout.splitlines()

    assert len(lines) == 5
    assert lines[0].startswith(f"::error file={SEEDS},line=")
    assert ",col=5,title=onefold lint%3A OF001::guards.orders: keep is 24h" in lines[0]
    assert "broken%2C or so%3A 100%25.yaml,line=3" in lines[-1]


def test_as_sarif(broken: str) -> None:
    said = onefold(SEEDS, broken, "--format", "sarif")
    document = json.loads(said.stdout)
    (run,) = document["runs"]

    assert said.exit_code == 2
    check_sarif(document)
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [rule.code for rule in RULES]
    assert len(run["results"]) == 3
    assert run["invocations"][0]["executionSuccessful"] is False
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 2
    assert "broken%2C%20or%20so" in json.dumps(run["invocations"])
    check_sarif(json.loads(onefold(CORRECTED, "--format", "sarif").stdout))


def check_sarif(document: dict[str, Any]) -> None:
    """What SARIF 2.1.0 demands of the parts that we write (its sections 3.13, 3.18, 3.19, 3.20, 3.27 to 3.30)."""
    assert document["version"] == "2.1.0"
    for run in document["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"]
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        assert all(isinstance(one["executionSuccessful"], bool) for one in run["invocations"])
        for result in run["results"]:
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert result["message"]["text"]
            for location in result["locations"]:
                physical = location["physicalLocation"]
                assert re.fullmatch(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", physical["artifactLocation"]["uri"])
                assert physical["region"]["startLine"] >= 1
                assert physical["region"]["startColumn"] >= 1


def test_the_schema_is_printed_for_editors() -> None:
    said = onefold("--schema")

    assert said.exit_code == 0
    assert json.loads(said.stdout) == schema()


def test_in_a_pipe_there_is_no_colour_and_a_reader_may_go_away() -> None:
    piped = subprocess.run([*COMMAND, SEEDS], capture_output=True, text=True, timeout=PATIENCE, check=False)
    shell = f"'{sys.executable}' -c 'from onefold.cli import main; main()' lint --schema | head -1"
    headed = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert "\x1b" not in piped.stdout + piped.stderr
    assert (headed.stdout, headed.stderr) == ("{\n", "")


@pytest.mark.parametrize(("no_colour", "terminal"), [("", "xterm"), ("1", "xterm"), ("", "dumb")])
def test_on_a_terminal_the_code_is_coloured_unless_no_color_is_set_or_it_is_dumb(no_colour: str, terminal: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": no_colour, "TERM": terminal}
    with subprocess.Popen([*COMMAND, SEEDS], stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as running:
        os.close(theirs)
        said = b""
        # A terminal whose other side is closed answers with an error, which is its end.
        while piece := _read(ours):
            said += piece
        running.wait(PATIENCE)
    os.close(ours)

    assert (b"\x1b[" in said) == (not no_colour and terminal != "dumb")
    assert b"OF001" in said


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.yaml", b"", "the file is empty"),
        ("binary.yaml", bytes(range(256)), "not text in UTF-8"),
        ("broken.yaml", b"stores: [", "broken YAML"),
        ("broken.toml", b"stores = [", "broken TOML"),
        ("onefold.ini", b"", "a configuration is a file with .yaml, .yml, .toml"),
        (
            "unset.yaml",
            b"stores: {a: {url: 'memory:'}}\nguards: {g: {store: a, keep: '${NOT_SET_HERE}'}}",
            "is not set",
        ),
        ("wrong.yaml", b"stores: 7\nguards: {}", "expected a table of names"),
    ],
)
def test_bad_input_gets_one_readable_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)

    said = onefold(str(tmp_path / name))

    assert said.exit_code == 2
    assert says in said.stderr
    assert said.stderr.count("\n") == 1
    assert said.stdout == ""


def test_without_pyyaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)

    said = onefold(SEEDS)

    assert said.exit_code == 2
    assert "pip install 'onefold[config]'" in said.stderr
    assert said.stderr.count("\n") == 1
