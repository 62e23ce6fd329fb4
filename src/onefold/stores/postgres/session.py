"""Properties of the session, learned on the first connection of a store and valid for all later ones."""

# ruff: noqa: S608 - a statement is made of the names in `records`, never of values

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from onefold.stores.postgres.urls import Settings
from onefold.stores.sql.records import TABLE

# Behind a pooler, the process that serves a statement is not the one that the connection was told of. The schema is the
# one that holds the tables or, if there are none, the one in which they would be created.
QUESTION: Final = (
    "SELECT pg_backend_pid(), "
    "(SELECT nspname::text FROM pg_namespace JOIN pg_class ON relnamespace = pg_namespace.oid "
    f"WHERE pg_class.oid = to_regclass('{TABLE}')), "
    "current_schema()::text"
)


class Session:
    """The use of prepared statements, and the schema of our tables: handlers may change their session's search path."""

    def __init__(self, settings: Settings) -> None:
        # None: not determined yet.
        self.prepare = settings.prepare
        # Whether the connections lead to the server itself, not to a pooler.
        self.is_direct = False
        # The qualifier of our tables, as for `located`.
        self.where = ""
        self._makes_tables = settings.auto_schema

    @property
    def is_known(self) -> bool:
        return self.prepare is not None and self.where != ""

    def learn(self, answer: Sequence[Any] | None, backend: int) -> None:
        """Evaluate the answer to `QUESTION` on a new connection, which reports its process as `backend`."""
        assert answer is not None
        server, there, first = answer
        self.is_direct = server == backend
        if self.prepare is None:
            self.prepare = self.is_direct
        schema = there or (first if self._makes_tables else None)
        if schema is not None:
            self.where = '"' + schema.replace('"', '""') + '".'
