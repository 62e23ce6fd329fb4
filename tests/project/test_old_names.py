"""Old names stay out of code, tests, examples, documentation and messages. The changelog may tell of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import PROJECT

PLACES: Final = ("src", "tests", "docs", "examples", "ops", "bench", "services")
PAGES: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "pyproject.toml")
KINDS: Final = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".lua", ".sql", ".txt"}

_IMPORTED: Final = r"\bfrom onefold import (?:\([^)]*|[^\n(]*)\b"
_ANSWERS: Final = r"(?:done|failed|rerun|not_done|unknown)"

# What each old name looks like, and the new one.
OLD: Final = {
    r"\battempts_max\b": "max_attempts",
    r"\bresult_bytes_max\b": "max_result_bytes",
    r"\bremember=|[\"'`]remember[\"'`]|\bremember: *[\[(\"']": "final_errors",
    r"\bunknown=[\[(\"']|\bunknown: *\[": "ambiguous_errors",
    r"\.remembered\b|\bremembered=": "recorded",
    r"\.but\(|\bdef but\b": "replace",
    r"\bOnHold\b|\b[Oo]n[ _-]hold\b": "held, or Held",
    r"\balso_read\b": "migrate_from",
    r"\bload\([^)\n]*is_async": "load_async",
    rf"{_IMPORTED}{_ANSWERS}\b|`{_ANSWERS}\(|\bresolve\([^)\n]*\b{_ANSWERS}\(": "Done, Failed, Rerun, NotDone, Unknown",
    rf"{_IMPORTED}Column\b|\bonefold\.Column\b|\brecord=Column\(": "RecordColumn",
    rf"{_IMPORTED}(?:KEY|OPERATION|SCOPE)_MAX\b": "onefold.keys",
    r"\.(?:run|run_batch|fresh)\([^)\n]*\bfingerprint=": "payload=",
}

# BabelQueue has a method of this name; the others are tests that the old name is refused.
EXCEPTIONS: Final = {
    "docs/queues/babelqueue.md": ("`remember`",),
    "src/onefold/queues/babelqueue.py": ("`remember`",),
    "src/onefold/queues/_shared/seen_sets.py": ('"remember"',),
    "tests/handlers/test_policy_keywords.py": ("fingerprint=",),
    "tests/project/test_old_names.py": ("",),
    "tests/record_format/test_node.py": ('"remember"',),
    "tests/typing/policies.py": ("attempts_max", "remember=", ".remembered", "fingerprint="),
}


def written() -> Iterator[Path]:
    for page in PAGES:
        yield PROJECT / page
    for place in PLACES:
        yield from (path for path in sorted((PROJECT / place).rglob("*")) if path.suffix in KINDS)


def is_allowed(path: Path, found: str) -> bool:
    return any(exception in found for exception in EXCEPTIONS.get(str(path.relative_to(PROJECT)), ()))


def old_names_in(text: str) -> Iterator[tuple[int, str, str]]:
    """The line of each old name, what stands there, and what to write."""
    for pattern, new in OLD.items():
        for match in re.finditer(pattern, text):
            yield text.count("\n", 0, match.start()) + 1, match[0], new


@pytest.mark.more
def test_no_old_name_is_left() -> None:
    left = [
        f"{path.relative_to(PROJECT)}:{line}: {found!r} is {new} now"
        for path in written()
        for line, found, new in old_names_in(path.read_text(encoding="utf-8"))
        if not is_allowed(path, found)
    ]

    assert left == []


@pytest.mark.parametrize(
    "text",
    [
        "Policy(attempts_max=3)",
        "result_bytes_max: 100",
        "@guard.idempotent('charge', key='id', remember=(Declined,))",
        "    remember: ['shop.Declined']",
        'Policy(unknown=("httpx.TransportError",))',
        "if outcome.remembered:",
        "guard.policy.but(keep='7d')",
        "raise OnHold",
        "the record is on hold",
        'Guard(new, also_read="redis://old")',
        'onefold.load("onefold.yaml", is_async=True)',
        "from onefold import Guard, done",
        "from onefold import (\n    Guard,\n    not_done,\n)",
        "Return `done(value)` from the probe",
        'guard.resolve("charge", "pay_1", failed("declined"))',
        "from onefold import Column, Guard",
        "guard.within(connection, record=Column(table))",
        "from onefold import KEY_MAX",
        'guard.run("charge", "pay_1", pay, fingerprint=[1])',
    ],
)
def test_an_old_name_is_found(text: str) -> None:
    assert list(old_names_in(text))


@pytest.mark.parametrize(
    "text",
    [
        "from sqlalchemy import Column\nfrom onefold import Guard",
        "Column('id', Integer)",
        "the error is remembered, and another transaction holds the row",
        "future.done()",
        "`unknown` never fails",
        "@guard.idempotent('charge', key='id', fingerprint=['amount'])",
        "measured(url, is_async=True)",
        "from onefold import Guard\n\ndone = guard.run('charge', 1, pay)",
    ],
)
def test_what_only_looks_like_one_is_not(text: str) -> None:
    assert not list(old_names_in(text))
