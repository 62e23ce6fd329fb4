"""Match names against patterns from files, in a bounded time: a pattern such as `(a+)+$` can take years for a name.

Nothing can stop a match in this process, so that a child matches, which is killed if it does not end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

# In seconds. Real patterns take microseconds; the start of the child takes most of it.
PATIENCE: Final = 10.0

# One line for each pattern, as soon as it is matched: the names, or null if it is no regular expression.
CHILD: Final = """\
import json, re, sys
for pattern, names in json.load(sys.stdin):
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, TypeError, OverflowError, RecursionError):
        found = None
    print(json.dumps(found), flush=True)
"""


class Endless(Exception):
    """A pattern did not end in time, the one of this index."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def matching(asked: Sequence[tuple[Any, Sequence[str]]]) -> list[list[str] | None]:
    """Return of each pattern which of its names match; None if it is no regular expression.

    Raises Endless for the first that does not end.
    """
    if not asked:
        return []
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", CHILD]
    given = json.dumps(asked).encode()
    try:
        ended = subprocess.run(command, input=given, capture_output=True, check=True, timeout=PATIENCE)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise Endless((error.stdout or b"").count(b"\n")) from None
    return [json.loads(line) for line in ended.stdout.splitlines()]
