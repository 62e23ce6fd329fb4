"""Finds the driver's own connection behind what libraries put before it: sessions, pool proxies, async shells.

Two deliveries are in one transaction if they are on one connection of the driver, by whichever object each was given
it. Each module of ours that knows a library registers here how its objects lead to that connection, when it is
imported: so no library is imported for a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

# From an object of a library to what stands behind it; None or the object itself: nothing does.
Unwrap = Callable[[Any], Any]

# A scoped session, an async session, a session, a connection, a pool's proxy: none has more before it.
DEPTH_MAX: Final = 8

_unwraps: Final[dict[str, Unwrap]] = {}


def register(library: str, unwrap: Unwrap) -> None:
    """Have the objects of a library, by the root of their module, unwrapped by this. It must not send anything."""
    _unwraps[library] = unwrap


def driver_connection(connection: object) -> object:
    """Return the driver's own connection; what is not known to have one behind it is returned as it is."""
    for _ in range(DEPTH_MAX):
        unwrap = _unwrap_of(type(connection))
        inner = None if unwrap is None else unwrap(connection)
        if inner is None or inner is connection:
            break
        connection = inner
    return connection


def _unwrap_of(kind: type) -> Unwrap | None:
    for parent in kind.__mro__:
        found = _unwraps.get(parent.__module__.partition(".")[0])
        if found is not None:
            return found
    return None
