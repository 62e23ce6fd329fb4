"""Find what packages have registered with ours by entry points: stores, clients and connections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

# The schemes of URLs; the packages whose clients, and whose connections and sessions, we take. Each names a module.
STORES: Final = "onefold.stores"
CLIENTS: Final = "onefold.clients"
CONNECTIONS: Final = "onefold.connections"


@cache
def installed(group: str) -> Mapping[str, str]:
    """Return the entry points of a group, by name. They are read once: it takes longer than many deliveries."""
    from importlib.metadata import entry_points

    return MappingProxyType({point.name: point.value for point in entry_points(group=group)})
