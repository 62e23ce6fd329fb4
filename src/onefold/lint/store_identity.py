"""Tell which URLs name one store, however they are written. Nothing is opened; each store knows its own URLs."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from onefold.stores.identity import Identity
from onefold.stores.kinds import kind_of, scheme_of


def identity_of(url: str) -> Identity:
    """Return the location that a URL names."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return Identity(url)
    identity = kind_of(url).identity
    if identity is None:
        return Identity(scheme_of(url), name=url.partition(":")[2])
    return identity(url, parts, dict(parse_qsl(parts.query)))


def is_volatile(url: str) -> bool:
    """Return whether a store would be in the memory of one connection."""
    return identity_of(url).volatile
