"""SQLite's description, for modules that know no store."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import SplitResult, unquote

from onefold.stores.identity import Identity
from onefold.stores.kinds import StoreKind


def identity(url: str, parts: SplitResult, _options: dict[str, str]) -> Identity:
    """Return the identity of the file, resolved against the working directory as the store would."""
    path, _, query = unquote(url.partition(":")[2]).partition("?")
    volatile = ":memory:" in path or not path.strip("/") or "mode=memory" in query
    return Identity("sqlite", name=os.path.abspath(unquote(parts.path).removeprefix("/")), volatile=volatile)


KIND: Final = StoreKind(
    name="SQLite",
    has_transactions=True,
    # A file has no password, and may have any name. Its reader takes no host, so that nothing can be cut off.
    has_login=False,
    has_our_clock=True,
    health="onefold.health.sqlite",
    table_reader="onefold.stores.sqlite.table_reader:SqliteReader",
    identity=identity,
)
