"""`onefold.load` and `onefold.load_async`, which import the configuration package only when they are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from onefold.codecs import Codec
    from onefold.config import AsyncGuards, Guards
    from onefold.events import Listener


def load(
    path: str | os.PathLike[str], *, on_event: Listener | Iterable[Listener] = (), codec: Codec | None = None
) -> Guards:
    """Build the guards that `onefold.yaml` or `onefold.toml` declares, by name: `load("onefold.yaml")["payouts"]`.

    Stores are opened on first use, once for all guards that share them, and closed by `close`. Raises `UsageError`,
    with file and line, for a file that cannot be used.
    """
    from onefold.config import Guards, read

    return Guards(read(path), on_event=on_event, codec=codec)


def load_async(
    path: str | os.PathLike[str], *, on_event: Listener | Iterable[Listener] = (), codec: Codec | None = None
) -> AsyncGuards:
    """Build an `AsyncGuard` for each guard that the file declares. Close them with `aclose`. See `load`."""
    from onefold.config import AsyncGuards, read

    return AsyncGuards(read(path), on_event=on_event, codec=codec)
