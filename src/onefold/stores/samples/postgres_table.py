"""PostgreSQL: whole pages from all over the table (TABLESAMPLE), and the server's own count of the rows.

A table with partitions is sampled like any other: the counts are those of its partitions.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from typing import Final, NamedTuple

from onefold._model import Record
from onefold.stores.samples.table import TableSampler, weighed
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import TABLE

# The table, or its partitions: whatever holds rows.
LEAVES: Final = (
    f"relkind = 'r' AND oid IN (WITH RECURSIVE tree AS (SELECT to_regclass('{TABLE}')::oid AS held_by UNION ALL "
    "SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = held_by) SELECT held_by FROM tree)"
)

# As the planner estimates it: the density of the pages at the last vacuum or analyze, on the pages that there are now.
_SIZE: Final = (
    "SELECT count(*), sum(pages), "
    "sum(CASE WHEN relpages > 0 AND reltuples >= 0 THEN reltuples / relpages * pages END), "
    "bool_and(pages = 0 OR (relpages > 0 AND reltuples >= 0)), current_setting('server_version_num')::integer FROM "
    "(SELECT relpages, reltuples, pg_relation_size(oid) / current_setting('block_size')::bigint AS pages "
    f"FROM pg_class WHERE {LEAVES}) AS leaves"
)

# A record without a result takes 200 bytes of a page of 8 KB. Used until the server has counted.
_ROWS_PER_PAGE: Final = 40

# Older servers would read the whole table to find the last pages.
_TID_RANGES_FROM: Final = 140_000


class Size(NamedTuple):
    """The size of the table, as the server knows it without a scan."""

    leaves: int
    pages: int
    # None: the server has not counted them yet.
    rows: float | None
    version: int


class PostgresSampler(TableSampler):
    """Samples pages, not rows: a sample of rows would read every page."""

    kept_longest = f"FROM {TABLE} WHERE due IS NOT NULL ORDER BY due DESC LIMIT :limit"

    def draw(self, limit: int) -> SqlFlow[list[tuple[Record, float]]]:
        size = yield from self._size()
        expected = size.rows or size.pages * _ROWS_PER_PAGE
        percent = min(100.0 * limit / max(expected, 1.0), 100.0)
        # Twice as many, should the server's count be far too low.
        source = f"FROM {TABLE} TABLESAMPLE SYSTEM (CAST(:percent AS double precision)) LIMIT :limit"
        found = yield from self.read(source, {"percent": percent, "limit": 2 * limit})
        while not found and percent < 100.0:
            # By chance, if there are only a few pages: of more it would have chosen some.
            percent = min(4.0 * percent, 100.0)
            found = yield from self.read(source, {"percent": percent, "limit": 2 * limit})
        return weighed(found, size.rows or len(found) * 100.0 / percent)

    def newest(self, limit: int) -> SqlFlow[list[Record]]:
        """Return the records of the last pages: a table that only grows has its newest records there."""
        size = yield from self._size()
        if size.leaves != 1 or size.version < _TID_RANGES_FROM:
            return []
        first = max(size.pages - max(limit // _ROWS_PER_PAGE, 1), 0)
        source = f"FROM {TABLE} WHERE ctid >= CAST(CAST(:first AS text) AS tid) LIMIT :limit"
        return (yield from self.read(source, {"first": f"({first},0)", "limit": 2 * limit}))

    def _size(self) -> SqlFlow[Size]:
        reply: Reply = yield SqlRequest(_SIZE, {}, rows=True)
        leaves, pages, rows, is_counted, version = reply.rows[0]
        return Size(int(leaves), int(pages or 0), float(rows) if is_counted and rows else None, int(version))
