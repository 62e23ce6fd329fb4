"""Parse YAML with the location of every value. PyYAML finds the nodes; the values are built here, from text alone.

Stricter than `yaml.safe_load`: duplicate keys and tags are refused, and of plain words only `true`, `false`, `null` and
numbers are more than text, as in YAML 1.2: `no` and `1:30` are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from onefold import UsageError
from onefold.config.tree import DEPTH_MAX, TOO_DEEP, VALUES_MAX, Mark, Path, Problem, Tree, unusable
from onefold.config.wording import shown

PLAIN: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
WHOLE: Final = re.compile(r"[-+]?[0-9]{1,18}")
BROKEN_NUMBER: Final = re.compile(r"[-+]?([0-9]{1,18}\.[0-9]*|\.[0-9]+|[0-9]{1,18})([eE][-+]?[0-9]{1,3})?")
TAGS: Final = frozenset({f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")})
MERGE: Final = "<<"
TOO_MANY: Final = f"more than {VALUES_MAX:,} values (an alias counts as often as it is used)"


def parse(text: str, file: str) -> Tree:
    """Return the tree of a YAML text. Raise `Unusable` with the line of the mistake."""
    yaml = _package()
    try:
        # BaseLoader creates only text, and composing not even that. Never the C loader: it recurses into "[[[[" without
        # a limit, and crashes the process.
        _check_depth(yaml, text, file)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise unusable(file, f"broken YAML: {_what(error)}", _mark(error.problem_mark or error.context_mark)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise unusable(
            file, f"broken YAML: it must not contain the character U+{ord(text[error.position]):04X}", Mark(line)
        ) from None
    reader = _Reader(file)
    value = None if node is None else reader.value(node, ())
    return Tree(file, value, reader.marks, tuple(reader.twice))


def _check_depth(yaml: Any, text: str, file: str) -> None:
    """Refuse a text that is nested too deeply. Unlike parsing, composing recurses as far as the interpreter lets it."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEPTH_MAX:
                raise unusable(file, TOO_DEEP, _mark(event.start_mark))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Reader:
    """Builds values from nodes, and notes their locations. An alias is read as often as it is used, within a bound."""

    def __init__(self, file: str) -> None:
        self.marks: dict[Path, Mark] = {}
        # Duplicate keys, in order and each once: an alias is read as often as it is used, and reported once.
        self.twice: dict[Problem, None] = {}
        self._file = file
        self._left = VALUES_MAX

    def value(self, node: Any, path: Path, depth: int = 0) -> Any:
        self._check(node, depth)
        self.marks.setdefault(path, _mark(node.start_mark))
        if node.id == "mapping":
            return self._mapping(node, path, depth)
        if node.id == "sequence":
            return [self.value(part, (*path, index), depth + 1) for index, part in enumerate(node.value)]
        return node.value if node.style else plain(node.value)

    def _check(self, node: Any, depth: int) -> None:
        self._left -= 1
        says = (
            TOO_DEEP
            if depth > DEPTH_MAX
            else TOO_MANY
            if self._left < 0
            else f"the tag {shown(node.tag)} is not allowed in this file"
            if node.tag not in TAGS
            else None
        )
        if says:
            raise unusable(self._file, says, _mark(node.start_mark))

    def _mapping(self, node: Any, path: Path, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for one in self._merged(node, depth):
            merged = self._mapping(one, path, depth + 1) | merged
        found: dict[str, Any] = {}
        for key, part in node.value:
            if _merges(key):
                continue
            if key.id != "scalar" or key.tag not in TAGS:
                raise unusable(self._file, "a key has to be a word", _mark(key.start_mark))
            name = key.value
            if name in found:
                self._note_twice(key, self.marks[(*path, name)].line)
                # It counts, so that a file of nothing else is bounded, too; the first one is read.
                self._check(part, depth + 1)
                continue
            self.marks[(*path, name)] = _mark(key.start_mark)
            found[name] = self.value(part, (*path, name), depth + 1)
        return merged | found

    def _note_twice(self, key: Any, first: int) -> None:
        says = f"{shown(key.value)} appears twice, first in line {first}"
        self.twice[Problem(self._file, _mark(key.start_mark), says)] = None

    def _merged(self, node: Any, depth: int) -> Iterator[Any]:
        """Yield the mappings that `<<` merges; of equal keys the earlier one counts."""
        for part in (part for key, part in node.value if _merges(key)):
            for one in part.value if part.id == "sequence" else [part]:
                self._check(one, depth)
                if one.id != "mapping":
                    raise unusable(self._file, "<< merges a mapping, or a list of them", _mark(one.start_mark))
                yield one


def _merges(key: Any) -> bool:
    return key.id == "scalar" and key.value == MERGE and not key.style


def plain(word: str) -> Any:
    """Return the value of an unquoted word in YAML 1.2."""
    lower = word.lower()
    if lower in PLAIN and word in (lower, lower.capitalize(), lower.upper()):
        return PLAIN[lower]
    if WHOLE.fullmatch(word):
        return int(word)
    return float(word) if BROKEN_NUMBER.fullmatch(word) else word


def _package() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise UsageError(
            "a configuration in YAML needs an extra: pip install 'onefold[config]' (TOML needs none)"
        ) from None
    return yaml


def _mark(mark: Any) -> Mark:
    return Mark(1) if mark is None else Mark(mark.line + 1, mark.column + 1)


def _what(error: Any) -> str:
    said = ", ".join(part for part in (error.context, error.problem) if part) or "it cannot be read"
    begun, here = error.context_mark, error.problem_mark
    return f"{said} (begun in line {begun.line + 1})" if begun and here and begun.line != here.line else said
