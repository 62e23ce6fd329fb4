"""What every SQL database has in common: the first page in the order of addresses, or a sample of the whole table.

Every statement has a LIMIT, and an index or a physical order to read in: none of them reads the whole table. Expired
records count as read, and are dropped here: a condition in the statement would let the server skip millions of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from onefold._model import Record
from onefold.stores.base import Query, Sample
from onefold.stores.sql.dialect import Dialect, Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import ADDRESS, TABLE, Parameters, records

BY_ADDRESS: Final = ", ".join(ADDRESS)

# Large, and not needed to count records.
_LEFT_OUT: Final = {"notes": "NULL", "result": "NULL"}


class TableSampler:
    """Reads a bounded part of the table of one database."""

    # Finds records by the index for purges, those that are kept longest first.
    kept_longest = f"FROM {TABLE} WHERE expires IS NOT NULL ORDER BY expires DESC LIMIT :limit"

    def __init__(self, sql: Dialect) -> None:
        self.sql = sql
        self.selected = ", ".join((*ADDRESS, *{**sql.read_as, **_LEFT_OUT}.values()))

    def sample(self, query: Query, limit: int) -> SqlFlow[Sample]:
        """Return all matching records if there are few, else some from all over the table."""
        named = {"scope": query.scope, "operation": query.operation if query.scope is not None else None}
        values = {name: value for name, value in named.items() if value is not None}
        within = f"WHERE {' AND '.join(f'{name} = :{name}' for name in values)} " if values else ""
        first = yield from self.read(
            f"FROM {TABLE} {within}ORDER BY {BY_ADDRESS} LIMIT :limit", values | {"limit": limit + 1}
        )
        if len(first) <= limit:
            return Sample.of(((one, 1.0) for one in first), query, complete=True)
        drawn = yield from self.draw(limit)
        return Sample.of(drawn, query, complete=False)

    def draw(self, limit: int) -> SqlFlow[list[tuple[Record, float]]]:
        """Return records from all over the table, each with the number of records that it stands for."""
        raise NotImplementedError(f"{type(self).__name__} draws no sample")

    def unsettled(self, limit: int) -> SqlFlow[list[Record]]:
        """Return up to `limit` records, those that are kept longest first; records kept forever are left out."""
        found = yield from self.read(self.kept_longest, {"limit": limit})
        return [one for one in found if not one.is_expired]

    def newest(self, limit: int) -> SqlFlow[list[Record]]:
        """Return about `limit` of the newest records; none where the database has no such order."""
        del limit
        yield from ()
        return []

    def read(self, source: str, values: Parameters) -> SqlFlow[list[Record]]:
        """Read records without what may be large in them."""
        statement = self.sql.in_dialect(f"SELECT {self.selected} {source}")
        reply: Reply = yield SqlRequest(statement, values, rows=True)
        return records(self.converted(reply.rows))

    def converted(self, rows: Sequence[Sequence[Any]]) -> Iterable[Sequence[Any]]:
        """Return the rows in the types of a record."""
        return rows


def weighed(found: Iterable[Record], total: float) -> list[tuple[Record, float]]:
    """Return each record with its share of the total, which is never less than what was seen."""
    seen = list(found)
    return [(one, max(total / len(seen), 1.0)) for one in seen]
