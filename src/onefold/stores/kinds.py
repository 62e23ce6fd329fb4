"""Ask each kind of store what it says of itself. Nothing else in the package names one.

A store is a module with an entry point in `onefold.stores` for each scheme of its URLs, and one in `onefold.clients`
for each package whose pools, engines or clients it takes over. Its `KIND` says the rest. Whoever has to know something
of a store that is not open yet asks for it here; a client library is not imported for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from onefold._entry_points import CLIENTS, STORES, installed

if TYPE_CHECKING:
    from urllib.parse import SplitResult

    from onefold.stores.identity import Identity


class StoreKind(msgspec.Struct, frozen=True, kw_only=True):
    """Say what is true of all stores of one kind."""

    # For people.
    name: str
    # Whether a record can commit with rows of the caller's. None: nobody knows.
    has_transactions: bool | None = None
    # Whether the server removes expired records, so that there is nothing to purge.
    expires_by_itself: bool = False
    # Whether a full server forgets what it knows, unless it is told not to.
    may_evict: bool = False
    # Whether its records live in the memory of one process.
    in_process: bool = False
    # Whether its URLs have a login, and so a password that can be cut by a character that should have been escaped.
    has_login: bool = True
    # Whether leases are counted by this machine's clock; and else how exactly the store tells its own, in seconds.
    has_our_clock: bool = False
    clock_margin: float = 0.0
    # The shortest lease, in seconds.
    lease_min: float = 0.0
    # What stands after a plus in the scheme and is for an `AsyncGuard` alone.
    async_drivers: tuple[str, ...] = ()
    # The module that judges its facts for `onefold doctor`: `judge(facts)` and `hindrance(facts)`.
    health: str = ""
    # The class that reads tables which are not ours, as "module:Reader".
    table_reader: str = ""
    # From a URL, its parts and its options to where the records are. None: the URL as it is written.
    identity: Callable[[str, SplitResult, dict[str, str]], Identity] | None = None


def schemes() -> Mapping[str, str]:
    """Return the URL schemes that are installed, and the module of each."""
    return installed(STORES)


def clients() -> Mapping[str, str]:
    """Return the packages whose pools, engines and clients are taken over, and the module that does it.

    It does so by `adopt(client, is_async=...)`. What the caller brought is the caller's to close.
    """
    return installed(CLIENTS)


def scheme_of(url: str) -> str:
    """Return the scheme, without what follows a plus: that is the store's own affair, as in `postgresql+asyncpg://`."""
    return url.partition(":")[0].lower().partition("+")[0]


def kind_of(url: str) -> StoreKind:
    """Return the kind of the store behind this URL, or behind a scheme alone; one that says nothing has a name."""
    scheme = scheme_of(url)
    module = schemes().get(scheme)
    return StoreKind(name=scheme) if module is None else kind_in(module)


def kind_in(module: str) -> StoreKind:
    """Return the kind of the stores in this module."""
    try:
        found: StoreKind | None = getattr(import_module(module), "KIND", None)
    except ImportError:
        # What it needs is not installed: whoever opens it is told.
        found = None
    return found or StoreKind(name=module)


def blocking(url: str) -> str:
    """Return the URL of the same database by its blocking driver: a tool is not in a hurry."""
    scheme, _, rest = url.partition(":")
    base, plus, driver = scheme.partition("+")
    return f"{base}:{rest}" if plus and driver.lower() in kind_of(base).async_drivers else url


def named(path: str) -> Any:
    """Import what a kind names as "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
