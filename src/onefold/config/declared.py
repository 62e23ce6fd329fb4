"""The content of a configuration, as data: stores, guards, and the location of each in the file."""

from __future__ import annotations

import msgspec

from onefold import FOREVER, Policy
from onefold.config.tree import Mark, Tree


class DeclaredStore(msgspec.Struct, frozen=True, kw_only=True):
    """A store as the file declares it."""

    name: str
    # None: a variable in it is not set, and was not required.
    url: str | None
    # The scheme before a plus or a colon, such as "redis"; empty if it is unknown.
    kind: str
    evicts: bool | None = None


class DeclaredTable(msgspec.Struct, frozen=True, kw_only=True):
    """A hand-made table as the file declares it; its names are those of `HandMadeTable`."""

    store: DeclaredStore
    table: str
    key: str
    operation: str | None = None
    operation_column: str | None = None
    scope_column: str | None = None
    result_column: str | None = None
    at: str | None = None
    keep: float = FOREVER


class Drifted(msgspec.Struct, frozen=True, kw_only=True):
    """A number that the file repeats by hand, and that is another one where it is set."""

    field: str
    name: str
    said: float
    found: float
    where: str


class DeclaredGuard(msgspec.Struct, frozen=True, kw_only=True):
    """A guard as the file declares it. Durations are seconds."""

    name: str
    store: DeclaredStore
    # The store that held the records before, while they move.
    migrate_from: DeclaredStore | None = None
    # The table that held them, if it was hand-made.
    migrate_table: DeclaredTable | None = None
    # Without objects that the file names in Python: `probe` and `final_errors` hold those names.
    policy: Policy
    # Whether the file sets `keep`: otherwise it is the policy's default.
    keep_said: bool = True
    mode: str = "claim"
    # The guard's name, if the file names none; then any operation may be used.
    operations: tuple[str, ...]
    any_operation: bool = False
    scope: str | None = None
    money: bool = False
    key: str | None = None
    probe: str | None = None
    final_errors: tuple[str, ...] = ()
    handler_time: float | None = None
    visibility_timeout: float | None = None
    provider_memory: float | None = None
    duplicates: dict[str, float] = {}
    replays: dict[str, float] = {}
    # Files with the settings of its queue, still to be read: `onefold.lint.settings` joins what they say.
    settings: tuple[str, ...] = ()
    # Where the visibility timeout was found, if not in this file; and numbers of this file that differ from the found.
    visibility_from: str = ""
    drifted: tuple[Drifted, ...] = ()
    # The queue or topic that it reads, and the broker to ask for its settings, for `onefold doctor`.
    queue: str | None = None
    broker: str | None = None


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The declarations of a file, and the location of each."""

    file: str
    stores: dict[str, DeclaredStore]
    guards: dict[str, DeclaredGuard]
    # Variables that are not set, and were not required.
    unset: tuple[str, ...]
    # Stores of a kind that no installed package has, if that was not required.
    unowned: tuple[str, ...] = ()
    tree: Tree

    def written_url(self, store: str) -> str:
        """Return the URL of this store as the file has it, with the names of variables."""
        return str(self.tree.value["stores"][store]["url"])

    def unset_of(self, store: str) -> list[str]:
        """Return the unset variables in the URL of this store."""
        written = self.written_url(store)
        return [name for name in dict.fromkeys(self.unset) if f"${{{name}}}" in written]

    def written_broker(self, guard: str) -> str | None:
        """Return the broker of this guard as the file has it, with the names of variables."""
        written = self.tree.value["guards"][guard].get("broker")
        return None if written is None else str(written)

    def mark(self, *path: str) -> Mark:
        """Return the location of an entry, or where it would have to be."""
        return self.tree.mark(path)
