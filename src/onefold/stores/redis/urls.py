"""Parse a URL into settings: the servers, and how to reach them. Nothing is opened.

redis://[user:password@]host[:port][/database]                 one server; rediss:// with TLS; valkey:// is the same
redis+unix:///path/to/socket                                   one server, on this machine
redis+sentinel://host[:port][,host[:port]]/service[/database]  the primary that Sentinel names
redis+cluster://host[:port][,host[:port]]                      a cluster, found from any of its servers
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from onefold._checks import at_least, did_you_mean, finite, one_of, positive, yes_or_no
from onefold.errors import UsageError
from onefold.stores.opening import check_password, without_password
from onefold.stores.urls import options_of

Deployment = Literal["alone", "unix", "sentinel", "cluster"]
DEPLOYMENTS: Final = {"": "alone", "unix": "unix", "sentinel": "sentinel", "cluster": "cluster"}

PREFIX: Final = "onefold:"

PORT: Final = 6379
SENTINEL_PORT: Final = 26379

# A reply takes less than a millisecond. Two lost connections and a timeout end before a lease of 30 s does.
SOCKET_TIMEOUT: Final = 5.0
CONNECT_TIMEOUT: Final = 2.0


class Settings(NamedTuple):
    """The content of a URL. `options` are those of the client library, by its names."""

    kind: Deployment
    shown: str
    hosts: tuple[tuple[str, int], ...]
    tls: bool
    path: str
    service: str
    database: int
    login: dict[str, str]
    sentinel_login: dict[str, str]
    options: dict[str, Any]
    # Options of the store itself: prefix, wait_replicas, wait_timeout.
    store: dict[str, Any]


def parsed(url: str) -> Settings:
    """Parse a URL. Raise `UsageError` for an invalid one."""
    check_password(url)
    parts, shown = urlsplit(url), without_password(url)
    scheme, _, way = parts.scheme.partition("+")
    if way not in DEPLOYMENTS or parts.fragment:
        raise UsageError(f"{shown!r}: write {_forms(scheme)}{did_you_mean(way, DEPLOYMENTS) if way else ''}")
    kind: Deployment = DEPLOYMENTS[way]  # type: ignore[assignment]
    credentials, _, hosts = parts.netloc.rpartition("@")
    path, service, database = _path(parts, kind, shown)
    known = {**OPTIONS, **(SENTINEL_OPTIONS if kind == "sentinel" else {})}
    given = options_of(parts.query, known, shown)
    read = {name: known[name](text, name) for name, text in given.items()}
    return Settings(
        kind=kind,
        shown=shown,
        hosts=_hosts(hosts, kind, shown),
        tls=scheme in ("rediss", "valkeys"),
        path=path,
        service=service,
        database=database,
        login=_login(credentials),
        sentinel_login={name.removeprefix("sentinel_"): read.pop(name) for name in SENTINEL_OPTIONS if name in read},
        store={name: read.pop(name) for name in STORE_OPTIONS if name in read},
        options={"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": CONNECT_TIMEOUT} | read,
    )


def _path(parts: SplitResult, kind: Deployment, shown: str) -> tuple[str, str, int]:
    """Return the socket file, the Sentinel service, and the number of a database."""
    path = unquote(parts.path)
    if kind == "unix":
        if parts.netloc or not path.startswith("/"):
            raise UsageError(f"{shown!r}: write redis+unix:///path/to/socket")
        return path, "", 0
    pieces = path.strip("/").split("/") if path.strip("/") else []
    service = ""
    if kind == "sentinel":
        if not pieces:
            raise UsageError(f"{shown!r} names no service: write redis+sentinel://host:port/service")
        service = pieces.pop(0)
    if len(pieces) > 1 or (pieces and not pieces[0].isdecimal()):
        raise UsageError(f"{shown!r}: {'/'.join(pieces)!r} is not a number of a database")
    database = int(pieces[0]) if pieces else 0
    if database and kind == "cluster":
        raise UsageError(f"{shown!r}: a cluster has only one database, number 0")
    return "", service, database


def _hosts(text: str, kind: Deployment, shown: str) -> tuple[tuple[str, int], ...]:
    if kind == "unix":
        return ()
    port = SENTINEL_PORT if kind == "sentinel" else PORT
    found = []
    for host in text.split(","):
        match = re.fullmatch(r"(\[[^]]+\]|[^:\[\]]*)(?::(\d{1,5}))?", host)
        if match is None:
            # The host itself is not shown: its port may be a secret whose @ is missing.
            raise UsageError(f"{shown!r}: write host:port, and a number for the port")
        found.append((unquote(match[1]).strip("[]") or "localhost", int(match[2] or port)))
    if len(found) > 1 and kind == "alone":
        raise UsageError(f"{shown!r} names {len(found)} servers: write redis+sentinel:// or redis+cluster://")
    return tuple(found)


def _login(credentials: str) -> dict[str, str]:
    user, _, password = credentials.partition(":")
    return {name: unquote(text) for name, text in (("username", user), ("password", password)) if text}


def _forms(scheme: str) -> str:
    return ", ".join((f"{scheme}://", *(f"{scheme}+{way}://" for way in DEPLOYMENTS if way)))


def _seconds(text: str, name: str) -> float:
    # The client library's URLs have plain numbers here, ours have units.
    plain = re.fullmatch(r"\d+(\.\d+)?", text)
    return finite(positive(float(text) if plain else text, name), name)


def _whole(text: str, name: str) -> int:
    return at_least(1, int(text) if text.isdecimal() else text, name)


def _count(text: str, name: str) -> int:
    return at_least(0, int(text) if text.isdecimal() else text, name)


def _text(text: str, name: str) -> str:
    if not text:
        raise UsageError(f"{name}= is empty")
    return text


def _requirement(text: str, name: str) -> str:
    return one_of(text, ("required", "optional", "none"), name)


STORE_OPTIONS: Final[dict[str, Callable[[str, str], Any]]] = {
    "prefix": lambda text, _name: text,
    "wait_replicas": _count,
    "wait_timeout": _seconds,
    "wakeups": yes_or_no,
}
CLIENT_OPTIONS: Final[dict[str, Callable[[str, str], Any]]] = {
    "socket_timeout": _seconds,
    "socket_connect_timeout": _seconds,
    "health_check_interval": _seconds,
    "max_connections": _whole,
    "client_name": _text,
    "ssl_ca_certs": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_cert_reqs": _requirement,
    "ssl_check_hostname": yes_or_no,
}
OPTIONS: Final = STORE_OPTIONS | CLIENT_OPTIONS
SENTINEL_OPTIONS: Final[dict[str, Callable[[str, str], Any]]] = {
    "sentinel_username": _text,
    "sentinel_password": _text,
}
