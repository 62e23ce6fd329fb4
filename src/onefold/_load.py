"""`onefold.load`, which imports the configuration package only when it is called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    import os

    from onefold.codecs import Codec
    from onefold.config import AsyncGuards, Guards
    from onefold.events import Listener


@overload
def load(
    path: str | os.PathLike[str],
    *,
    is_async: Literal[False] = False,
    on_event: Listener | Iterable[Listener] = (),
    codec: Codec | None = None,
) -> Guards: ...
@overload
def load(
    path: str | os.PathLike[str],
    *,
    is_async: Literal[True],
    on_event: Listener | Iterable[Listener] = (),
    codec: Codec | None = None,
) -> AsyncGuards: ...
def load(path: str | os.PathLike[str], *, is_async: bool = False, **options: Any) -> Guards | AsyncGuards:
    """Build the guards that `onefold.yaml` or `onefold.toml` declares, by name: `load("onefold.yaml")["payouts"]`.

    `is_async=True` builds `AsyncGuard`s. Stores are opened on first use, once for all guards that share them, and
    closed by `close` or `aclose`. Raises `UsageError`, with file and line, for a file that cannot be used.
    """
    from onefold.config import AsyncGuards, Guards, read

    declared = read(path)
    return AsyncGuards(declared, **options) if is_async else Guards(declared, **options)
