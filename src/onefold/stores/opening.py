"""Turn what a user passes as `store=` into a store: a URL, a pool, engine or client, a store, or a function of one."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any, Final

from onefold._checks import did_you_mean
from onefold._entry_points import CONNECTIONS, installed
from onefold.errors import UsageError
from onefold.stores.base import Joinable, Store
from onefold.stores.kinds import clients, forms, kind_in, kind_of, scheme_of, schemes


def open_store(source: Any, *, is_async: bool) -> tuple[Any, bool]:
    """Return the store, and whether it is ours to close."""
    if isinstance(source, str):
        return _from_url(source, is_async=is_async), True
    client_of = _adopting(source)
    if client_of is not None:
        return import_module(client_of).adopt(source, is_async=is_async), True
    if _is_store(source):
        return _checked(source, is_async=is_async), False
    if callable(source):
        made = source()
        # It may return anything a guard takes: a URL from the settings, a pool that is created late.
        if isinstance(made, str) or _adopting(made) is not None:
            return open_store(made, is_async=is_async)
        return _checked(made, is_async=is_async), False
    raise UsageError(_what_it_takes(source))


def check_source(source: Any, *, is_async: bool) -> None:
    """Check whatever can be checked before the store is opened."""
    client_of = _adopting(source)
    if isinstance(source, str):
        _check_url(source, is_async=is_async)
    elif client_of is not None:
        # The package is imported already: the caller has created the client.
        getattr(import_module(client_of), "check_client", _taken_as_it_is)(source, is_async=is_async)
    elif _is_store(source):
        _checked(source, is_async=is_async)
    elif not callable(source) or _is_connection(source):
        raise UsageError(_what_it_takes(source))


def _check_url(url: str, *, is_async: bool) -> None:
    """Check the options of a URL, too: the module of a store can have `check_url`, which imports no driver."""
    try:
        module = module_of(url)
    except ImportError:
        # A dependency is not installed: opening the store reports it.
        return
    getattr(module, "check_url", _taken_as_it_is)(url, is_async=is_async)


def _taken_as_it_is(_source: Any, *, is_async: bool) -> None:
    """Accept any client or URL: it is checked when it is used."""


def _adopting(source: Any) -> str | None:
    """Return our module for this pool, engine or client."""
    for kind in type(source).__mro__:
        package = kind.__module__.partition(".")[0]
        # Most sources are stores: skip the lookup of installed packages for them.
        module = None if package in ("builtins", "onefold") else clients().get(package)
        if module is not None:
            return module
    return None


def without_transactions(source: Any) -> str:
    """Return the name of a store that has no transactions of its own; empty if it has, or if that is unknown."""
    if _is_store(source):
        return "" if isinstance(source, Joinable) else type(source).__name__
    module = _adopting(source)
    if module is not None:
        client = type(source).__module__.partition(".")[0]
        return client if kind_in(module, client).has_transactions is False else ""
    named = isinstance(source, str) and kind_of(source).has_transactions is False
    return scheme_of(source) if named else ""


def _is_store(source: Any) -> bool:
    # A store class has the methods too; it is a function that returns a store.
    return isinstance(source, Store) and not isinstance(source, type)


# A host with its port. A port that is not a number is a truncated password.
_HOST: Final = r"(?:\[[^\]@]*\]|[^\[\]:@/?#,]*)(?::[0-9]*)?"
_SERVERS: Final = rf"(?:[^@/?#\[\]]*@)?{_HOST}(?:,{_HOST})*(?:/[^@?#]*)?"
# After an @ in an option there is neither a port nor a path: with either it would be the end of a password.
_OPTION: Final = r"[^=&@#]*(?:=[^&@#]*(?:@[^&@#/?:]*)*)?"
# A login, servers and a path, or (for a socket file) only a path; then options, and a fragment.
_PLAIN: Final = rf"(?:{_SERVERS}|/[^:?#]*)(?:\?{_OPTION}(?:&{_OPTION})*)?(?:#[^@]*)?"


def check_password(url: str) -> None:
    """Refuse a URL whose password ends too early: the rest of it would be taken for a host or a path, and shown."""
    scheme, _, rest = url.partition("://")
    if (_is_cut(rest) or not _can_be_split(url)) and kind_of(scheme).has_login:
        shown = without_password(url) if "@" in url else f"{scheme}://"
        raise UsageError(
            f"store={shown!r} cannot be read. In the user and password, write %40 for @, %23 for #, %2F for /, "
            "%3F for ?, %5B for [ and %5D for ]"
        )


def _is_cut(rest: str) -> bool:
    """Return whether the part after the scheme has an @ or a bracket in a wrong place."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(authority) :]:
        return re.fullmatch(_PLAIN, rest) is None
    return re.search(r"[@\[\]]", authority.rpartition("@")[0]) is not None


def _can_be_split(url: str) -> bool:
    from urllib.parse import urlsplit

    try:
        urlsplit(url)
    except ValueError:
        # Its message may quote a part of the password.
        return False
    return True


def _scheme(url: str) -> str:
    check_password(url)
    scheme, colon, rest = url.partition(":")
    known = schemes()
    if not colon and scheme in known:
        raise UsageError(f"store={url!r} is not a URL: did you mean '{scheme}:'?")
    base = scheme_of(url)
    if not colon or base not in known:
        near = did_you_mean(scheme, known) or (f": did you mean 'sqlite:///{url}'?" if _is_file(url) else ".")
        raise UsageError(
            f"store={without_password(url)!r}: no store is known for {scheme!r}{near} Known: {', '.join(forms())}"
        )
    if "@" in rest and not rest.startswith("//"):
        raise UsageError(f"store={without_password(url)!r}: write {scheme}://, with both slashes")
    return base


def _is_file(written: str) -> bool:
    """Return whether this looks like the path of a file rather than a URL."""
    return ":" not in written and "@" not in written and (os.sep in written or "." in written)


def module_of(url: str) -> Any:
    """Return the module of the store behind this URL."""
    return import_module(schemes()[_scheme(url)])


def _from_url(url: str, *, is_async: bool) -> Any:
    open_it = getattr(module_of(url), "open_async_store" if is_async else "open_store", None)
    if open_it is None:
        kind, guard = ("async", "a Guard") if is_async else ("sync", "an AsyncGuard")
        raise UsageError(f"store={without_password(url)!r}: this kind of store has no {kind} form: use {guard}")
    return open_it(url)


def _checked(store: Any, *, is_async: bool) -> Any:
    import inspect

    if not _is_store(store):
        raise UsageError(_what_it_takes(store))
    if inspect.iscoroutinefunction(store.claim) != is_async:
        mine, other = ("an AsyncGuard", "a Guard") if is_async else ("a Guard", "an AsyncGuard")
        form = "async" if is_async else "sync"
        raise UsageError(
            f"{type(store).__name__} belongs to {other}, but this is {mine}: pass its {form} form, or a URL, which has "
            "both"
        )
    return store


def _is_connection(source: object) -> bool:
    """Return whether it is a connection or session of a driver; some of them can be called, like a function."""
    return not isinstance(source, type) and type(source).__module__.partition(".")[0] in installed(CONNECTIONS)


def _what_it_takes(source: object) -> str:
    if _is_connection(source):
        return (
            f"store={type(source).__name__} is a connection, and a guard needs several: pass the URL of its database, "
            "or use guard.within(connection) in a transaction of yours"
        )
    return (
        f"store={type(source).__name__} is not a store: pass a URL such as 'memory:', a pool, an engine or a client, "
        "a Store, or a function that returns one of them"
    )


# Options that hold a secret in any store: `sentinel_password=`, `aws_secret_access_key=`, `aws_session_token=`. Options
# that a store refuses are masked, too: somebody may have written a secret there anyway.
_SECRET: Final = re.compile(
    r"passw|pwd|passphrase|secret|token|credential|signature|api_?key|access_?key|private_?key", re.IGNORECASE
)

# Where a port should be, after a host without brackets: a word is a secret whose @ is missing.
_WORD_FOR_A_PORT: Final = re.compile(r"(?<=[^:/?#,]):(?![0-9]*(?:[,/?#]|$))[^,/?#]*")


def without_password(url: str) -> str:
    """Return the URL as a message may show it: without its password, and without secrets in its options."""
    # The part after a # is not an option, but may be the rest of a password that should have used %23.
    url = re.sub(r"([?&][^=&#]*=)([^&]*)", _without_secret, url)
    before, at, after = url.rpartition("@")
    if not at:
        return _without_port_as_text(url)
    if "://" not in before:
        return f"***@{after}"
    scheme, _, credentials = before.partition("://")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{after}"


def _without_secret(option: re.Match[str]) -> str:
    from urllib.parse import unquote

    return f"{option[1]}***" if _SECRET.search(unquote(option[1])) else option[0]


def _without_port_as_text(url: str) -> str:
    scheme, slashes, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if not slashes or "[" in authority:
        return url
    return f"{scheme}://{_WORD_FOR_A_PORT.sub(':***', authority)}{rest[len(authority) :]}"
