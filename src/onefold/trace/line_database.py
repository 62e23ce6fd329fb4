"""Sort lines on disk: memory does not grow with the logs.

SQLite in a temporary file is the external sort: it holds `CACHE_BYTES` in memory, however much there is to sort, and
its answers are exact. Nothing is written elsewhere, and the file is removed with the database.
"""

# ruff: noqa: S608 - statements are made of names in this file, never of values

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import astuple

from onefold.trace.leaks import Leak, Seen, Sent
from onefold.trace.lines import HOUR, Line

# The cache of the database, and of each sort.
CACHE_BYTES: Final = 32 << 20

# How many keys of one message are examined: an id that has more is not an id, and is reported as crowded.
SEEN_MAX: Final = 1_000

_TABLES: Final = f"""
CREATE TABLE line (
    hop TEXT, key TEXT, ts REAL, scope TEXT, delivery TEXT, request TEXT, producer TEXT,
    hour INTEGER AS (CAST(ts / {HOUR} AS INTEGER)) STORED
);
CREATE TABLE leak (
    kind TEXT, hop TEXT, ts REAL, before TEXT, after TEXT, previous TEXT, id TEXT,
    PRIMARY KEY (kind, hop, before, after)
) WITHOUT ROWID;
"""

_ADD: Final = "INSERT INTO line VALUES (?, ?, ?, coalesce(?, ''), ?, ?, ?)"

# A temporary database needs no journal, and nothing in it has to be overwritten.
_SETTINGS: Final = (
    "page_size = 16384",
    "journal_mode = OFF",
    "synchronous = OFF",
    "secure_delete = OFF",
    "locking_mode = EXCLUSIVE",
    "temp_store = FILE",
    f"cache_size = {-CACHE_BYTES // 1024}",
)

# Every query about keys is answered in the order of this index, and from it alone.
_BY_KEY: Final = "CREATE INDEX IF NOT EXISTS by_key ON line (hop, scope, key, hour, request, producer)"

_HOURS: Final = """
SELECT hop, hour, min(first), sum(lines), count(*), sum(sent), sum(sent > 0) FROM
    (SELECT hop, hour, min(rowid) AS first, count(*) AS lines, count(producer) AS sent
     FROM line GROUP BY hop, scope, key, hour)
GROUP BY hop, hour
"""

_REPEATED: Final = """
SELECT hop, scope, key, hour, count(producer), min(request), max(request), min(producer), max(producer)
FROM line WHERE (hop, scope, key) IN
    (SELECT hop, scope, key FROM line GROUP BY hop, scope, key
     HAVING min(request) <> max(request) OR count(producer) > 1)
GROUP BY hop, scope, key, hour ORDER BY hop, scope, key, hour
"""


class LineDatabase:
    """The lines of all logs, available in any order."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onefold-trace-")
        file = Path(self._folder.name) / "lines.db"
        self._database = sqlite3.connect(file, isolation_level=None)
        for setting in _SETTINGS:
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(_TABLES)
        # Unlinked at once, so that a killed process leaves no gigabytes behind. Windows cannot unlink an open file.
        with contextlib.suppress(OSError):
            file.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        self._folder.cleanup()

    def add(self, lines: Iterable[Line]) -> None:
        self._database.execute("BEGIN")
        self._database.executemany(_ADD, map(astuple, lines))
        self._database.execute("COMMIT")

    def hours(self) -> Iterator[Sequence[Any]]:
        """Yield every hop in every hour: its first line's number, lines, keys, producer lines, producer keys."""
        self._database.execute(_BY_KEY)
        yield from self._database.execute(_HOURS)

    def by_key(self) -> Iterator[Sent]:
        """Yield the rows of keys with several requests, or sent several times, at their hops, hour by hour."""
        self._database.execute(_BY_KEY)
        yield from map(Sent._make, self._database.execute(_REPEATED))

    def by_message(self, column: str) -> Iterator[tuple[str, list[Seen], bool]]:
        """Yield the messages with more than one key, by their `delivery` or `request`: the id, its keys at each hop.

        The last value is whether there were too many to examine all of them.
        """
        index = f"CREATE INDEX by_{column} ON line ({column}, key, hop, ts) WHERE {column} IS NOT NULL"
        self._database.execute(index)
        rows = self._database.execute(
            f"SELECT {column}, hop, key, min(ts) FROM line WHERE {column} IN (SELECT {column} FROM line "
            f"WHERE {column} IS NOT NULL GROUP BY {column} HAVING min(key) <> max(key)) "
            f"GROUP BY {column}, key, hop ORDER BY {column}"
        )
        for id_, found in groupby(rows, key=lambda row: row[0]):
            seen: list[Seen] = []
            crowded = False
            for _, *facts in found:
                crowded = len(seen) >= SEEN_MAX
                if not crowded:
                    seen.append(Seen(*facts))
            yield id_, seen, crowded

    def keep(self, leaks: Iterable[Leak]) -> None:
        """Store leaks, each once: the same one may show in two ways."""
        rows = ((one.kind.value, one.hop, one.ts, one.before, one.after, one.previous, one.id) for one in leaks)
        self._database.execute("BEGIN")
        self._database.executemany("INSERT OR IGNORE INTO leak VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self._database.execute("COMMIT")

    def kept(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield how many leaks of each kind each hop has in each hour."""
        hours = f"SELECT kind, hop, CAST(ts / {HOUR} AS INTEGER) AS hour, count(*) FROM leak GROUP BY kind, hop, hour"
        yield from self._database.execute(hours)

    def examples(self, kind: str, limit: int) -> Sequence[Any]:
        """Return the first leaks of a kind at each hop, by time: hop, ts, before, after, previous, id."""
        wanted = (
            "SELECT hop, ts, before, after, previous, id FROM "
            "(SELECT *, row_number() OVER (PARTITION BY hop ORDER BY ts, id) AS place FROM leak WHERE kind = ?) "
            "WHERE place <= ? ORDER BY ts, id"
        )
        return self._database.execute(wanted, (kind, limit)).fetchall()
