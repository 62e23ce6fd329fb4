"""`make mutate`: which breaks a source offers, and what the tests of a broken copy are taken to have said."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.mutate.__main__ import main
from bench.mutate.breaks import breaks
from bench.mutate.runner import PROJECT, Copy, Red, Verdict
from bench.mutate.suites import SUITES, suite

SOURCE = '''\
"""Never broken: a docstring, an annotation, what only types need."""

LIMIT: int = 3


def admits(size: int, *, strict: bool = False) -> bool:
    """Nor is this one."""
    if size > LIMIT and not strict:
        raise ValueError(size)
    return size + 1 <= LIMIT
'''

BREAKS = [
    (3, "3", "4"),
    (6, "False", "True"),
    (8, "size > LIMIT and not strict", "(not (size > LIMIT and (not strict)))"),
    (8, ">", ">="),
    (8, "and", "or"),
    (8, "not strict", "(strict)"),
    (9, "raise ValueError(size)", "pass"),
    (10, "return size + 1 <= LIMIT", "return None"),
    (10, "+", "-"),
    (10, "1", "2"),
    (10, "<=", "<"),
]


def test_a_break_changes_one_token_or_leaves_out_one_statement() -> None:
    found = [(broken.line, broken.old, broken.new) for broken in breaks(SOURCE)]

    assert found == BREAKS


def test_a_broken_source_differs_in_one_place_and_can_be_parsed() -> None:
    source = (PROJECT / "src/onefold/_delivery/decide.py").read_text(encoding="utf-8")

    # One in five of them, of every kind: each is parsed.
    for broken in list(breaks(source))[::5]:
        changed = broken.applied(source)
        ast.parse(changed)
        assert changed != source
        assert changed.startswith(source[: broken.start])
        assert changed.endswith(source[broken.end :])


def test_letters_of_several_bytes_move_no_break() -> None:
    [broken] = [
        broken for broken in breaks('def name() -> bool:\n    return "Übergröße" == "é"\n') if broken.old == "=="
    ]

    assert broken.applied('def name() -> bool:\n    return "Übergröße" == "é"\n').endswith('"Übergröße" != "é"\n')


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """A project of one module, one test that knows it, and one that does not."""
    # Its tests need none of our plugins, which take longer to import than they to run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "admission.py").write_text(SOURCE)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "test_some.py").write_text("from admission import admits\n\n\ndef test_it():\n    assert admits(2)\n")
    return Copy(tmp_path, seconds_max=120)


@pytest.mark.parametrize(
    ("old", "verdict"), [("return size + 1 <= LIMIT", Verdict.NOTICED), ("raise ValueError(size)", Verdict.SURVIVED)]
)
@pytest.mark.more
def test_what_no_test_notices_survives_and_the_source_is_whole_afterwards(
    copy: Copy, old: str, verdict: Verdict
) -> None:
    [broken] = [broken for broken in breaks(SOURCE) if broken.old == old]
    tests = ("test_some.py",)
    copy.check_green(tests)

    assert copy.judge(Path("src/admission.py"), broken.applied(SOURCE), tests) is verdict
    assert (copy.folder / "src" / "admission.py").read_text() == SOURCE


@pytest.mark.more
def test_tests_that_wait_for_ever_have_noticed_it(copy: Copy) -> None:
    hasty = Copy(copy.folder, seconds_max=1)
    endless = SOURCE.replace("return size", "while True: pass\n    return size")

    assert hasty.judge(Path("src/admission.py"), endless, ("test_some.py",)) is Verdict.TIMED_OUT


@pytest.mark.more
def test_tests_that_are_red_before_anything_is_broken_judge_nothing(copy: Copy) -> None:
    (copy.folder / "test_some.py").write_text("def test_it():\n    assert False\n")

    with pytest.raises(Red, match="before anything was broken"):
        copy.check_green(("test_some.py",))


def test_every_module_of_the_core_the_stores_and_the_adapters_has_tests_that_should_notice() -> None:
    tests = PROJECT / "tests"
    modules = [path.relative_to(PROJECT / "src/onefold") for path in (PROJECT / "src/onefold").rglob("*.py")]
    broken = [module for module in modules if module.parts[0] in ("stores", "transactions", "http", "queues")]

    assert all(suite(module.as_posix(), tests) for module in broken)
    assert suite("heartbeat.py", tests)


def test_no_suite_names_tests_that_are_not_there() -> None:
    patterns = {pattern for _, patterns in SUITES for pattern in patterns}

    assert not [pattern for pattern in sorted(patterns) if not list((PROJECT / "tests").glob(pattern))]


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "python -m bench.mutate --only" in capsys.readouterr().out
