"""The fragments of MySQL's and MariaDB's statements, with the server's clock."""

from __future__ import annotations

import re
from typing import Final

from onefold.stores.sql.records import ADDRESS, ALIVE, AT, READ, TABLE, WRITTEN
from onefold.stores.sql.statements import columns, values

# The server's own clock in seconds, with microseconds. In UTC, because the hour in which local clocks are set back
# occurs twice. The start of the statement, because each mention of SYSDATE() is another time: a record could be expired
# in one column and not yet in the next. A statement that waits for a row counts its lease from before the wait, as its
# worker does.
NOW: Final = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)"

_CLOCK: Final = re.compile(r":now\b")
_KEY: Final = re.compile(r"(?<![:\w`])key\b")
_WORD: Final = re.compile(r"(?<!\w)'(\w+)'")


def render(statement: str) -> str:
    """Render the server's clock, quote `key`, and make literals bytes whatever the session's charset."""
    return _WORD.sub(r"_binary'\1'", _KEY.sub("`key`", _CLOCK.sub(NOW, statement)))


# Assignments run from left to right, and each sees those before it: `expires`, which decides, comes last.
_UNLESS_ALIVE: Final = ", ".join(
    f"{column} = IF(expires <= :now, VALUES({column}), {column})"
    for column in sorted(WRITTEN, key=lambda column: column == "expires")
)

INTO: Final = render(f"INSERT INTO {TABLE} ({columns()}) VALUES")
ROW: Final = render(f"({values()})")
OR_LEAVE: Final = render(f"ON DUPLICATE KEY UPDATE {_UNLESS_ALIVE}")
ADDRESSED: Final = render(", ".join((*ADDRESS, *READ.values())))
IN_THE_WAY: Final = render(f"WHERE {AT} AND {ALIVE}")
