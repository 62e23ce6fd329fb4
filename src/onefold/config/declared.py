"""The content of a configuration, as data: stores, guards, and where each of them is in the file."""

from __future__ import annotations

import msgspec

from onefold import Policy
from onefold.config.tree import Mark, Tree


class DeclaredStore(msgspec.Struct, frozen=True, kw_only=True):
    """A store as the file declares it."""

    name: str
    # None: a variable in it is not set, and was not required.
    url: str | None
    # The scheme before a plus or a colon, "redis" say; empty if it is unknown.
    kind: str
    evicts: bool | None = None


class DeclaredGuard(msgspec.Struct, frozen=True, kw_only=True):
    """A guard as the file declares it. Durations are seconds."""

    name: str
    store: DeclaredStore
    # The store that held the records before, while they move.
    migrate_from: DeclaredStore | None = None
    # Without what the file names in Python: `probe` and `remember` have the names.
    policy: Policy
    # Whether the file sets `keep`: otherwise it is the policy's own.
    keep_said: bool = True
    mode: str = "claim"
    # The guard's name, if the file names none; then any may be used.
    operations: tuple[str, ...]
    any_operation: bool = False
    scope: str | None = None
    money: bool = False
    key: str | None = None
    probe: str | None = None
    remember: tuple[str, ...] = ()
    handler_time: float | None = None
    visibility_timeout: float | None = None
    provider_memory: float | None = None
    duplicates: dict[str, float] = {}
    replays: dict[str, float] = {}


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The declarations of a file, and where each is."""

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

    def mark(self, *path: str) -> Mark:
        """Return where this is, or would have to be."""
        return self.tree.mark(path)
