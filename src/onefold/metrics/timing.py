"""Measure how long a store's calls take: `Guard(measured("postgresql://…"))`.

It forwards every call unchanged, has the capabilities of the inner store (batches, browsing, transactions) and no
others, and never changes an answer or an error. Work in a transaction is not timed: that time is the caller's own.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from onefold import AsyncGuard, Guard, UsageError
from onefold.stores.base import AsyncStore, Store

CALLS: Final = (
    "claim",
    "extend",
    "finish",
    "release",
    "read",
    "purge",
    "claim_all",
    "extend_all",
    "close_all",
    "annotate",
    "browse",
)

# Capabilities that are forwarded untimed. The class has to have them: a capability check does not look at an instance.
UNTIMED: Final = ("transaction", "facts")


class Timing(NamedTuple):
    """One call of a measured store."""

    store: str
    call: str
    seconds: float
    failed: bool


TimingListener = Callable[[Timing], object]

_listeners: list[TimingListener] = []


def subscribe(listener: TimingListener) -> Callable[[], None]:
    """Call `listener` with every timing in this process; call the returned function to stop."""
    _listeners.append(listener)

    def unsubscribe() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return unsubscribe


class Measured:
    """A store around another one. Untimed attributes are the inner store's own."""

    def __init__(self, store: Any, name: str) -> None:
        self.inner = store
        self.measured_as = name

    def __getattr__(self, name: str) -> Any:
        # Only called for attributes that this class does not have. A copy in the making has no inner store yet.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"measured({self.inner!r})"


def measured(source: Any, *, name: str | None = None, is_async: bool = False) -> Any:
    """Return the store behind `source` (whatever a guard takes), with its calls timed; `name` is its label in metrics.

    For an `AsyncGuard` pass `is_async=True`, or an async store. A store that was opened here is closed by its own
    `close()` or `aclose()`: a guard closes only stores that it has opened.
    """
    if isinstance(source, Measured):
        raise UsageError("measured(): this store is already measured")
    store = source if _is_store(source) else (AsyncGuard if is_async else Guard)(source).store
    timed = _timed_async if inspect.iscoroutinefunction(store.claim) else _timed
    has = {call: timed(call) for call in CALLS if hasattr(store, call)}
    has |= {power: _handed_on(power) for power in UNTIMED if hasattr(store, power)}
    return type(f"Measured{type(store).__name__}", (Measured,), has)(store, name or type(store).__name__)


def _is_store(source: Any) -> bool:
    return isinstance(source, (Store, AsyncStore)) and not isinstance(source, type)


class _Stopwatch:
    """One call in progress, whose listeners are told when it ends, however it ends."""

    __slots__ = ("_began", "_call", "_store")

    def __init__(self, store: str, call: str) -> None:
        self._store = store
        self._call = call

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _tell(Timing(self._store, self._call, time.perf_counter() - self._began, kind is not None))


def _timed(call: str) -> Callable[..., Any]:
    def timed(self: Measured, *args: Any, **kwargs: Any) -> Any:
        with _Stopwatch(self.measured_as, call):
            return getattr(self.inner, call)(*args, **kwargs)

    return timed


def _timed_async(call: str) -> Callable[..., Any]:
    async def timed(self: Measured, *args: Any, **kwargs: Any) -> Any:
        with _Stopwatch(self.measured_as, call):
            return await getattr(self.inner, call)(*args, **kwargs)

    return timed


def _handed_on(power: str) -> Callable[..., Any]:
    def handed_on(self: Measured, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, power)(*args, **kwargs)

    return handed_on


def _tell(timing: Timing) -> None:
    for listener in tuple(_listeners):
        try:
            listener(timing)
        except Exception:
            logging.getLogger("onefold").exception("a listener failed on a timing of %s", timing.store)
