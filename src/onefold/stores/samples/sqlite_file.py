"""SQLite: short runs of rows at equal distances from the first to the last."""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

from typing import Final

from onefold._model import Record
from onefold.stores.samples.table import TableSampler, weighed
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import TABLE

# How many runs of rows make up a sample.
RUNS: Final = 50

_ENDS: Final = f"SELECT (SELECT min(rowid) FROM {TABLE}), (SELECT max(rowid) FROM {TABLE})"
_RUN: Final = f"FROM {TABLE} WHERE rowid >= :first AND rowid < :end ORDER BY rowid LIMIT :limit"

# Where a run ended, which its records do not say.
_SPAN: Final = (
    f"SELECT max(rowid) FROM (SELECT rowid FROM {TABLE} WHERE rowid >= :first AND rowid < :end "
    "ORDER BY rowid LIMIT :limit)"
)


class SqliteSampler(TableSampler):
    """Rows are numbered as they were written; purged ones leave gaps, which the runs measure."""

    def draw(self, limit: int) -> SqlFlow[list[tuple[Record, float]]]:
        ends: Reply = yield SqlRequest(_ENDS, {}, rows=True)
        first, last = ends.rows[0]
        if first is None:
            return []
        step, size = max((last - first + 1) / RUNS, 1.0), max(limit // RUNS, 1)
        found: list[Record] = []
        seen = 0
        for number in range(RUNS):
            start, end = first + round(number * step), first + round((number + 1) * step)
            values = {"first": start, "end": end, "limit": size}
            run = yield from self.read(_RUN, values)
            found += run
            spanned: Reply = yield SqlRequest(_SPAN, values, rows=True)
            seen += end - start if len(run) < size else spanned.rows[0][0] - start + 1
        return weighed(found, len(found) / max(seen, 1) * (last - first + 1))

    def newest(self, limit: int) -> SqlFlow[list[Record]]:
        return (yield from self.read(f"FROM {TABLE} ORDER BY rowid DESC LIMIT :limit", {"limit": limit}))
