"""Find the driver's own connection behind the wrappers of libraries: sessions, pool proxies, async shells.

Two deliveries are in one transaction if they use one driver connection, whichever object each was given. Each of our
modules that knows a library registers here, on import, how its objects lead to that connection: so a comparison imports
no library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

# From an object of a library to the one it wraps; None or the object itself: it wraps none.
Unwrap = Callable[[Any], Any]

# A scoped session, an async session, a session, a connection, a pool's proxy: no chain is longer.
DEPTH_MAX: Final = 8

_unwraps: Final[dict[str, Unwrap]] = {}


def register(library: str, unwrap: Unwrap) -> None:
    """Unwrap the objects of a library, by the root of their module, with this function. It must not send anything."""
    _unwraps[library] = unwrap


def driver_connection(connection: object) -> object:
    """Return the driver's own connection; return an object that is not known to wrap one unchanged."""
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
