"""Find the stores, clients and connections that packages have registered by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

# The URL schemes; the packages whose clients, and whose connections and sessions, we adopt. Each names a module.
STORES: Final = "onefold.stores"
CLIENTS: Final = "onefold.clients"
CONNECTIONS: Final = "onefold.connections"


@cache
def installed(group: str) -> Mapping[str, str]:
    """Return the entry points of a group, by name. They are read once: it takes longer than many deliveries."""
    from importlib.metadata import entry_points

    return MappingProxyType({point.name: point.value for point in entry_points(group=group)})
