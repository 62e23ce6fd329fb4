"""Create the tables in an Alembic migration: `op.create_onefold_tables()`, `op.drop_onefold_tables()`.

Import this module in the migration, or in `env.py`, to register the operations. They send the statements of the
database's own dialect, which detect what is already done: after an upgrade of Onefold, a new migration with the same
call upgrades older tables. With `--sql` they are printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alembic.operations import MigrateOperation, Operations
from sqlalchemy import text

from onefold.stores.schema import PARTITIONS, TABLES
from onefold.stores.sqlalchemy import schema_versions


@Operations.register_operation("create_onefold_tables")
class CreateOnefoldTables(MigrateOperation):
    """Create the tables, or upgrade them to this version."""

    @classmethod
    def create_onefold_tables(cls, operations: Operations) -> None:
        """Create Onefold's tables, or upgrade them to this version."""
        operations.invoke(cls())

    def reverse(self) -> MigrateOperation:
        return DropOnefoldTables()


@Operations.register_operation("drop_onefold_tables")
class DropOnefoldTables(MigrateOperation):
    """Drop the tables, with all records in them."""

    @classmethod
    def drop_onefold_tables(cls, operations: Operations) -> None:
        """Drop Onefold's tables, with all records in them."""
        operations.invoke(cls())

    def reverse(self) -> MigrateOperation:
        return CreateOnefoldTables()


@Operations.implementation_for(CreateOnefoldTables)
def _create(operations: Operations, _operation: CreateOnefoldTables) -> None:
    for statements in schema_versions(operations.migration_context.dialect):
        for statement in statements:
            # A colon in it is not a bind parameter.
            operations.execute(text(statement.strip().replace(":", r"\:")))


@Operations.implementation_for(DropOnefoldTables)
def _drop(operations: Operations, _operation: DropOnefoldTables) -> None:
    for table in TABLES:
        operations.execute(text(f"DROP TABLE IF EXISTS {table}"))


def include_name(name: str | None, type_: str, _parents: Mapping[str, Any]) -> bool:
    """Hide the tables from autogenerate, which would drop them: for `context.configure(include_name=...)`.

    And their partitions, whose names begin with that of the table.
    """
    return not (type_ == "table" and name is not None and (name in TABLES or name.startswith(PARTITIONS)))
