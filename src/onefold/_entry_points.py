"""What packages have registered with ours: stores, clients and connections, by entry points."""

from __future__ import annotations

from functools import cache
from typing import Final

# The schemes of URLs; the packages whose clients, and whose connections and sessions, we take. Each names a module.
STORES: Final = "onefold.stores"
CLIENTS: Final = "onefold.clients"
CONNECTIONS: Final = "onefold.connections"


@cache
def installed(group: str) -> dict[str, str]:
    """Return the entry points of a group, by name. They are read once: it takes longer than many deliveries."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=group)}
