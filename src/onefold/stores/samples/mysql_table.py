"""MySQL and MariaDB: both ends of each operation, and the optimizer's estimate of what is between them.

There is no way to read random rows, and the table is in the order of its addresses: so the operations of each scope are
found by skipping from one to the next in the primary key.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, never of values

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from onefold._model import Record
from onefold.stores.mysql.statements.literals import as_read
from onefold.stores.samples.table import BY_ADDRESS, TableSampler, weighed
from onefold.stores.sql.dialect import Reply, SqlFlow, SqlRequest
from onefold.stores.sql.records import AT, TABLE

# How many operations are looked at, counted in each scope; each takes four short statements.
GROUPS_MAX: Final = 50

_ROWS: Final = re.compile(r'"rows(?:_examined_per_scan)?"\s*:\s*(\d+)')

_WITHIN: Final = "scope = :scope AND operation = :operation"
_ALL: Final = (
    f"SELECT table_rows FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = '{TABLE}'"
)

Group = tuple[str, str]


class MysqlSampler(TableSampler):
    """Samples the first and the last records of each operation, by their keys."""

    # The inner query reads the index alone: for whole rows the server might sort the table instead.
    kept_longest = (
        f"FROM (SELECT scope AS kept_scope, operation AS kept_operation, key AS kept_key FROM {TABLE} "
        f"WHERE expires IS NOT NULL ORDER BY expires DESC LIMIT :limit) AS kept STRAIGHT_JOIN {TABLE} "
        f"WHERE {AT.replace(':', 'kept_')}"
    )

    def draw(self, limit: int) -> SqlFlow[list[tuple[Record, float]]]:
        groups = yield from self._groups()
        share = max(limit // (2 * len(groups)), 1) if groups else 0
        drawn: list[tuple[Record, float]] = []
        for group in groups:
            drawn += yield from self._of(group, share)
        if len(groups) < GROUPS_MAX:
            return drawn
        counted: Reply = yield SqlRequest(_ALL, {}, rows=True)
        # The remaining operations are assumed to be like these.
        more = max(float(counted.rows[0][0] or 0) / sum(weight for _, weight in drawn), 1.0)
        return [(one, weight * more) for one, weight in drawn]

    def _of(self, group: Group, share: int) -> SqlFlow[list[tuple[Record, float]]]:
        values = dict(zip(("scope", "operation"), group, strict=True))
        found: dict[Any, Record] = {}
        for order in ("", " DESC"):
            by = ", ".join(f"{name}{order}" for name in BY_ADDRESS.split(", "))
            end = yield from self.read(
                f"FROM {TABLE} WHERE {_WITHIN} ORDER BY {by} LIMIT :limit", values | {"limit": share}
            )
            found |= {one.address: one for one in end}
        if len(found) < 2 * share:
            # The two ends have met.
            return weighed(found.values(), len(found))
        statement = self.sql.in_dialect(f"EXPLAIN FORMAT=JSON SELECT 1 FROM {TABLE} WHERE {_WITHIN}")
        plan: Reply = yield SqlRequest(statement, values, rows=True)
        rows = _ROWS.search(_text(plan.rows[0][0]))
        return weighed(found.values(), float(rows[1]) if rows else len(found))

    def _groups(self) -> SqlFlow[list[Group]]:
        """Return the first scopes and operations, in the order of the primary key."""
        groups: list[Group] = []
        condition, values = "", dict[str, Any]()
        while len(groups) < GROUPS_MAX:
            statement = f"SELECT scope, operation FROM {TABLE} {condition}ORDER BY {BY_ADDRESS} LIMIT :limit"
            reply: Reply = yield SqlRequest(self.sql.in_dialect(statement), values | {"limit": 1}, rows=True)
            if not reply.rows:
                break
            scope, operation = (_text(cell) for cell in reply.rows[0][:2])
            groups.append((scope, operation))
            condition = "WHERE scope > :scope OR (scope = :scope AND operation > :operation) "
            values = {"scope": scope, "operation": operation}
        return groups

    def converted(self, rows: Sequence[Sequence[Any]]) -> Iterable[Sequence[Any]]:
        return map(as_read, rows)


def _text(cell: bytes | str) -> str:
    return cell if isinstance(cell, str) else bytes(cell).decode()
