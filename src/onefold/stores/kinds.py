"""Look up the properties of each kind of store. Nothing else in the package names one.

A store is a module with an entry point in `onefold.stores` for each scheme of its URLs, and one in `onefold.clients`
for each package whose pools, engines or clients it adopts. Its `KIND` describes the rest. Code that needs to know
something about a store that is not open yet asks here; no client library is imported for that.
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
    """The properties that all stores of one kind share."""

    # The name for people.
    name: str
    # Whether a record can commit with the caller's rows. None: unknown.
    has_transactions: bool | None = None
    # Whether the server removes expired records, so that there is nothing to purge.
    expires_by_itself: bool = False
    # Whether a full server evicts records, unless configured not to.
    may_evict: bool = False
    # Whether its records live in the memory of one process.
    in_process: bool = False
    # Whether its URLs have a login, and so a password that an unescaped character could cut short.
    has_login: bool = True
    # Whether leases are counted by this machine's clock; if not, how exactly the store's own clock is known, in
    # seconds.
    has_our_clock: bool = False
    clock_margin: float = 0.0
    # The shortest lease, in seconds.
    lease_min: float = 0.0
    # Drivers, written after a plus in the scheme, that only an `AsyncGuard` can use.
    async_drivers: tuple[str, ...] = ()
    # Whatever else may be written after a plus: another driver, or the way to the servers.
    variants: tuple[str, ...] = ()
    # The module that judges its facts for `onefold doctor`: `judge(facts)` and `hindrance(facts)`.
    health: str = ""
    # The class that reads tables which are not ours, as "module:Reader".
    table_reader: str = ""
    # Maps a URL, its parts and its options to the location of the records. None: the URL as it is written.
    identity: Callable[[str, SplitResult, dict[str, str]], Identity] | None = None


def schemes() -> Mapping[str, str]:
    """Return the installed URL schemes, and the module of each."""
    return installed(STORES)


def forms() -> list[str]:
    """Return how a URL can begin, for messages: each scheme, and one of each store with what may follow a plus."""
    found = []
    for scheme in sorted(schemes()):
        kind = kind_of(scheme)
        after = (*kind.variants, *kind.async_drivers) if scheme == kind.name.lower() else ()
        found += [f"{scheme}:", *(f"{scheme}+{variant}:" for variant in after)]
    return found


def clients() -> Mapping[str, str]:
    """Return the packages whose pools, engines and clients are adopted, and the module that does it.

    The module has `adopt(client, is_async=...)`. The caller closes whatever the caller passed.
    """
    return installed(CLIENTS)


def scheme_of(url: str) -> str:
    """Return the scheme without the part after a plus, which is the store's own, as in `postgresql+asyncpg://`."""
    return url.partition(":")[0].lower().partition("+")[0]


def kind_of(url: str) -> StoreKind:
    """Return the kind of the store behind this URL or scheme."""
    scheme = scheme_of(url)
    module = schemes().get(scheme)
    return StoreKind(name=scheme) if module is None else kind_in(module, scheme)


def kind_in(module: str, name: str) -> StoreKind:
    """Return the kind of the stores in this module; without a description, it has only this name."""
    try:
        found: StoreKind | None = getattr(import_module(module), "KIND", None)
    except ImportError:
        # A dependency is not installed: opening the store reports it.
        found = None
    return found or StoreKind(name=name)


def has_async_driver(url: str) -> bool:
    """Return whether only an `AsyncGuard` can open this URL, because of the driver that it names."""
    base, _, driver = url.partition(":")[0].partition("+")
    return driver != "" and driver.lower() in kind_of(base).async_drivers


def blocking(url: str) -> str:
    """Return the URL of the same database with its blocking driver, for tools."""
    scheme, _, rest = url.partition(":")
    return f"{scheme.partition('+')[0]}:{rest}" if has_async_driver(url) else url


def named(path: str) -> Any:
    """Import an object that a kind names as "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
