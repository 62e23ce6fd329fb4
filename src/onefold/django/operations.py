"""The operation of our migrations: the statements of the database's own dialect, which detect what is already done."""

# ruff: noqa: ARG002 - Django passes the states of models, and there are none

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from onefold.stores.django import schema_versions
from onefold.stores.schema import TABLES


class BringTablesTo(Operation):  # type: ignore[misc]
    """Upgrade the tables from the previous version to this one.

    Going back from version 1 drops the tables. Going back from a later one does nothing: the previous version of the
    library works on the newer form, too.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: there are no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if router.allow_migrate(schema_editor.connection.alias, app_label):
            for statement in schema_versions(schema_editor.connection)[self.version - 1]:
                schema_editor.execute(statement.strip(), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if self.version == 1 and router.allow_migrate(schema_editor.connection.alias, app_label):
            for table in TABLES:
                schema_editor.execute(f"DROP TABLE IF EXISTS {table}", params=None)

    def describe(self) -> str:
        return f"Upgrade Onefold's tables to version {self.version}"

    @property
    def migration_name_fragment(self) -> str:
        return f"onefold_{self.version}"
