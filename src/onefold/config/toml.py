"""Parse TOML with the line of every value. `tomllib` reports none, so it is given one statement at a time.

Only a text that `tomllib` has accepted as a whole is split, so that each statement ends where it can be parsed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, Final

from onefold.config.tree import DEPTH_MAX, TOO_DEEP, Mark, Path, Tree, unusable

# A statement is parsed again with each of its lines. In a longer one, no lines are determined.
STATEMENT_LINES_MAX: Final = 50

# `a.a.a.a` costs tomllib the square of its length. No URL is as long as this.
LINE_MAX: Final = 2_000

POSITION: Final = re.compile(r" \(at line ([0-9]+), column ([0-9]+)\)$")

# Strings and comments, where a bracket has no meaning; and the brackets themselves.
STRING_COMMENT_OR_BRACKET: Final = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3} | '{3}.*?'{3} | "(?:\\.|[^"\\\n])*" | '[^'\n]*' | \#[^\n]* | [\[\]{}]""",
    re.VERBOSE | re.DOTALL,
)


def parse(text: str, file: str) -> Tree:
    """Return the tree of a TOML text. Raise `Unusable` with the line of the mistake."""
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > LINE_MAX:
            raise unusable(
                file, f"a line has at most {LINE_MAX:,} characters, but this one has {len(line):,}", Mark(number)
            )
    _check_depth(text, file)
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = POSITION.search(str(error))
        mark = Mark(int(where[1]), int(where[2])) if where else Mark(text.count("\n") + 1)
        raise unusable(file, f"broken TOML: {POSITION.sub('', str(error))}", mark) from None
    return Tree(file, value, _marks(text))


def _check_depth(text: str, file: str) -> None:
    """Refuse a text that is nested too deeply. `tomllib` recurses as far as the interpreter lets it."""
    depth = 0
    for found in STRING_COMMENT_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > DEPTH_MAX:
            raise unusable(file, TOO_DEEP, Mark(text.count("\n", 0, found.start()) + 1))


def _marks(text: str) -> dict[Path, Mark]:
    marks: dict[Path, Mark] = {}
    table: Path = ()
    for line, written in _statements(text.split("\n")):
        if written is None:
            continue
        paths = list(_paths(written[1]))
        if written[0]:
            table = max(paths, key=len, default=())
            paths = [table[: length + 1] for length in range(len(table))]
        else:
            paths = [(*table, *path) for path in paths]
        for path in paths:
            marks.setdefault(path, Mark(line))
    return marks


def _statements(lines: list[str]) -> Iterator[tuple[int, tuple[bool, dict[str, Any]] | None]]:
    """Yield each statement with its first line, and whether it is the header of a table."""
    at = 0
    while at < len(lines):
        for end in range(at + 1, min(at + STATEMENT_LINES_MAX, len(lines)) + 1):
            try:
                found = tomllib.loads("\n".join(lines[at:end]))
            except tomllib.TOMLDecodeError:
                continue
            yield at + 1, (lines[at].lstrip().startswith("["), found) if found else None
            at = end
            break
        else:
            return


def _paths(found: dict[str, Any]) -> Iterator[Path]:
    """Yield the paths of all values in one statement."""
    waiting: list[tuple[Path, Any]] = [((), found)]
    while waiting:
        path, value = waiting.pop()
        if path:
            yield path
        if len(path) < DEPTH_MAX and isinstance(value, dict):
            waiting += [((*path, name), part) for name, part in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, index), part) for index, part in enumerate(value) if not isinstance(part, list)]
