"""From what a user passes as `store=` to a store: a URL, a store, or a function that returns one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from onefold._checks import did_you_mean
from onefold.errors import UsageError
from onefold.stores.base import AsyncStore, Store

GROUP = "onefold.stores"

StoreSource = str | Store | Callable[[], Store]
AsyncStoreSource = str | AsyncStore | Callable[[], AsyncStore]


def open_store(source: Any, *, awaited: bool) -> tuple[Any, bool]:
    """The store, and whether it is ours to close."""
    if isinstance(source, str):
        return _from_url(source, awaited=awaited), True
    if _is_store(source):
        return _checked(source, awaited=awaited), False
    if callable(source):
        return _checked(source(), awaited=awaited), False
    raise UsageError(_what_it_takes(source))


def check_source(source: Any) -> None:
    """What can be said before the store is opened."""
    if isinstance(source, str):
        _scheme(source)
    elif not _is_store(source) and not callable(source):
        raise UsageError(_what_it_takes(source))


def _is_store(source: Any) -> bool:
    # A class of stores has the methods too; it is a function that returns one.
    return isinstance(source, Store) and not isinstance(source, type)


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    known = schemes()
    if not colon and scheme in known:
        raise UsageError(f"store={url!r} is no URL: did you mean '{scheme}:'?")
    if not colon or scheme.lower() not in known:
        raise UsageError(
            f"store={without_password(url)!r}: no store is known for {scheme!r}{did_you_mean(scheme, known) or '.'} "
            f"Known are {', '.join(f'{name}:' for name in sorted(known))}"
        )
    return scheme.lower()


def schemes() -> dict[str, str]:
    """The URL schemes that are installed, and the module of each."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}


def _from_url(url: str, *, awaited: bool) -> Any:
    module = import_module(schemes()[_scheme(url)])
    return module.open_async_store(url) if awaited else module.open_store(url)


def _checked(store: Any, *, awaited: bool) -> Any:
    import inspect

    if not _is_store(store):
        raise UsageError(_what_it_takes(store))
    if inspect.iscoroutinefunction(store.claim) != awaited:
        mine, other = ("an AsyncGuard", "a Guard") if awaited else ("a Guard", "an AsyncGuard")
        raise UsageError(f"{type(store).__name__} belongs to {other}, and this is {mine}")
    return store


def _what_it_takes(source: object) -> str:
    return (
        f"store={type(source).__name__} is no store: pass a URL such as 'memory:', a Store, "
        "or a function that returns a Store"
    )


def without_password(url: str) -> str:
    before, at, after = url.rpartition("@")
    if not at or "://" not in before:
        return url
    scheme, _, credentials = before.partition("://")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{after}"
