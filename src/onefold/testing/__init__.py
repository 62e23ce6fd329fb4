"""For tests of your own handlers, and for authors of stores. See `docs/testing.md`.

Nothing here is imported before it is used, and only the plugin imports pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.testing.clock import Clock
    from onefold.testing.contract import AsyncStoreContract, StoreContract
    from onefold.testing.crash import Crash, crash_at
    from onefold.testing.deliver import deliver_twice
    from onefold.testing.swap import use

__all__ = ["AsyncStoreContract", "Clock", "Crash", "StoreContract", "crash_at", "deliver_twice", "use"]

_HOMES = {
    "AsyncStoreContract": "contract",
    "Clock": "clock",
    "Crash": "crash",
    "StoreContract": "contract",
    "crash_at": "crash",
    "deliver_twice": "deliver",
    "use": "swap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
