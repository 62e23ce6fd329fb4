"""Parse JSON with the line of every value. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

from onefold.lint.settings.found import SettingsFile, Wrong

# A path into the document: ("queues", 3, "arguments", "x-message-ttl").
Path = tuple[str | int, ...]

PART: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,]|[^\s][^\s,:\]}]*|\n')

# Enough for any export; deeper is an attack on the parser.
DEPTH_MAX: Final = 50


class Document(NamedTuple):
    """A JSON object, and the line of each part."""

    file: str
    value: dict[str, Any]
    lines: dict[Path, int]

    def line(self, *path: str | int) -> int | None:
        """Return the line of a part; if it is not there, of what would have it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def parse(given: SettingsFile) -> Document:
    """Return the object in a text. Raise `Wrong` with the line of the mistake."""
    try:
        value = json.loads(given.text)
    except json.JSONDecodeError as error:
        raise Wrong(given.file, error.lineno, f"broken JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise Wrong(given.file, None, "broken JSON: nested too deeply, or with a number that is too long") from None
    if not isinstance(value, dict):
        raise Wrong(given.file, 1, "expected a JSON object, {...}")
    return Document(given.file, value, _lines(given))


def _lines(given: SettingsFile) -> dict[Path, int]:
    """Return the line of each part of a text that is known to be JSON."""
    found: dict[Path, int] = {}
    # The path of the open brackets, with the name or index of the part that comes next; None: a name comes first.
    path: list[str | int | None] = []
    line = 1
    for part in PART.findall(given.text):
        if part == "\n":
            line += 1
        elif part in "]}":
            path.pop()
        elif part == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        elif part == ":":
            continue
        elif path and path[-1] is None:
            path[-1] = json.loads(part)
            found[tuple(path)] = line  # type: ignore[arg-type]  # only the last one can be None
        else:
            found.setdefault(tuple(path), line)  # type: ignore[arg-type]
            if part in "[{":
                path.append(0 if part == "[" else None)
                if len(path) > DEPTH_MAX:
                    raise Wrong(given.file, line, f"nested more than {DEPTH_MAX} deep")
    return found
