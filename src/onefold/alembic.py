"""Alembic operations that make the tables in a migration: `op.create_onefold_tables()`, `op.drop_onefold_tables()`.

Import this module in the migration, or in `env.py`, and the operations are there. They send the statements of the
database's own dialect, which see what is done already: after an upgrade of Onefold, a new migration with the same call
brings older tables forward. With `--sql` they are written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alembic.operations import MigrateOperation, Operations
from sqlalchemy import text

from onefold.stores.schema import TABLES
from onefold.stores.sqlalchemy import schema_versions


@Operations.register_operation("create_onefold_tables")
class CreateOnefoldTables(MigrateOperation):
    """Make the tables, or bring them to the form of this version."""

    @classmethod
    def create_onefold_tables(cls, operations: Operations) -> None:
        """Make the tables of Onefold, or bring them to the form of this version."""
        operations.invoke(cls())

    def reverse(self) -> MigrateOperation:
        return DropOnefoldTables()


@Operations.register_operation("drop_onefold_tables")
class DropOnefoldTables(MigrateOperation):
    """Drop the tables, with all records in them."""

    @classmethod
    def drop_onefold_tables(cls, operations: Operations) -> None:
        """Drop the tables of Onefold, with all records in them."""
        operations.invoke(cls())

    def reverse(self) -> MigrateOperation:
        return CreateOnefoldTables()


@Operations.implementation_for(CreateOnefoldTables)
def _create(operations: Operations, _operation: CreateOnefoldTables) -> None:
    for statements in schema_versions(operations.migration_context.dialect):
        for statement in statements:
            # No colon in it is the place of a value.
            operations.execute(text(statement.strip().replace(":", r"\:")))


@Operations.implementation_for(DropOnefoldTables)
def _drop(operations: Operations, _operation: DropOnefoldTables) -> None:
    for table in TABLES:
        operations.execute(text(f"DROP TABLE IF EXISTS {table}"))


def include_name(name: str | None, type_: str, _parents: Mapping[str, Any]) -> bool:
    """For `context.configure(include_name=...)` in `env.py`: autogenerate would drop the tables that no model has."""
    return not (type_ == "table" and name in TABLES)
