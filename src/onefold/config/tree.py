"""A file as a tree of plain values, with the location of each; and the errors of a file that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from onefold import UsageError

# The path of an entry: ("guards", "payouts", "keep").
Path = tuple[str | int, ...]

# A configuration has four levels. Anything deeper is a mistake, or an attack on the parser.
DEPTH_MAX: Final = 20
TOO_DEEP: Final = f"nested more than {DEPTH_MAX} deep"

# A hundred guards with every field are some 3,000 values. YAML aliases count as often as they are used.
VALUES_MAX: Final = 50_000


class Mark(NamedTuple):
    """A location in a file, counted from 1. The TOML parser reports no columns."""

    line: int
    column: int | None = None


class Problem(NamedTuple):
    """Why a file cannot be used, and where. `mark` is None if the file itself is wrong."""

    file: str
    mark: Mark | None
    says: str

    def __str__(self) -> str:
        return f"{location(self.file, self.mark)}: {self.says}"


class Unusable(UsageError):
    """A configuration cannot be used; `problems` has everything that was found, the message the first of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        more = len(problems) - 1
        super().__init__(f"{problems[0]}{f' (and {more} more: see `onefold lint`)' if more else ''}")
        self.problems = tuple(problems)


class Tree(NamedTuple):
    """The content of a file, and the location of each part."""

    file: str
    value: Any
    marks: dict[Path, Mark]
    # Mistakes that do not prevent the rest from being read.
    problems: tuple[Problem, ...] = ()

    def mark(self, path: Path) -> Mark:
        """Return the location of a path; if it is not in the file, where it would have to be."""
        while path not in self.marks and path:
            path = path[:-1]
        return self.marks.get(path, Mark(1))


def location(file: str, mark: Mark | None) -> str:
    """Return `onefold.yaml:7:5`, as editors and CI expect it."""
    found = [] if mark is None else [mark.line] if mark.column is None else list(mark)
    return ":".join([file, *map(str, found)])


def unusable(file: str, says: str, mark: Mark | None = None) -> Unusable:
    return Unusable([Problem(file, mark, says)])
