"""Read a configuration, `onefold.yaml` or `onefold.toml`, strictly, and report the location of every mistake.

It opens no store and imports none of your code, so that a lint may read a file that it does not trust.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from onefold.config import toml as _toml
from onefold.config import yaml as _yaml
from onefold.config.declared import Configuration, DeclaredGuard, DeclaredStore
from onefold.config.reading import Reading
from onefold.config.tree import Mark, Problem, Unusable, unusable
from onefold.config.wording import shown

__all__ = ["FILE_MAX", "Configuration", "DeclaredGuard", "DeclaredStore", "Mark", "Problem", "Unusable", "read"]

# A hundred guards with every field take some 60 KiB. PyYAML needs a few seconds for the maximum.
FILE_MAX: Final = 256 << 10

LANGUAGES: Final = {".yaml": _yaml.parse, ".yml": _yaml.parse, ".toml": _toml.parse}


def read(
    path: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None, to_run: bool = True
) -> Configuration:
    """Return the declarations of a file. Raise `Unusable`, with every mistake in it.

    `to_run=False` does without the variables in store URLs, and without the packages of stores, so that a commit hook
    can lint without secrets.
    """
    file = os.fspath(path)
    language = LANGUAGES.get(os.path.splitext(file)[1].lower())
    if language is None:
        raise unusable(file, f"a configuration is a file with {', '.join(LANGUAGES)}")
    tree = language(_text_of(file), file)
    reading = Reading(tree, os.environ if environment is None else environment, to_run=to_run)
    found = reading.configuration()
    problems = [*tree.problems, *reading.problems]
    if problems:
        raise Unusable(sorted(problems, key=_by_position))
    return found


def _by_position(problem: Problem) -> tuple[int, int]:
    return (problem.mark.line, problem.mark.column or 0) if problem.mark else (0, 0)


def _text_of(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            found = opened.read(FILE_MAX + 1)
    except FileNotFoundError:
        raise unusable(file, "there is no such file") from None
    except IsADirectoryError:
        raise unusable(file, "this is a folder: name the file in it") from None
    except (OSError, ValueError) as error:
        raise unusable(shown(file), f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(found) > FILE_MAX:
        raise unusable(file, f"a configuration has at most {FILE_MAX >> 10} KiB, but this file has more")
    try:
        return found.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        raise unusable(file, f"this is not text in UTF-8 (byte 0x{found[error.start]:02x})", Mark(line)) from None
