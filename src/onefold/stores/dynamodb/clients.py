"""Provide a store's clients: its own, one for each process or loop; or the caller's, which is not closed.

A child never uses a client of its parent process: they would read each other's replies. A client of an event loop is
never used by another loop, and is closed with its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from onefold._checks import not_installed
from onefold.errors import UsageError

if TYPE_CHECKING:
    import asyncio

# The client itself repeats a request that fails on its way, or is throttled. Every write of ours may be repeated.
ATTEMPTS_MAX: Final = 3

# Ten, the default, is few for a busy worker with threads.
CONNECTIONS_MAX: Final = 50

# The attributes that hold items or values, in requests and in replies.
VALUES: Final = ("Key", "Item", "ExpressionAttributeValues", "ExclusiveStartKey")
REPLIED: Final = ("Item", "LastEvaluatedKey")


class Settings(NamedTuple):
    """The settings of our own client. Anything not set comes from the AWS configuration."""

    region: str | None
    endpoint_url: str | None
    profile: str | None
    timeout: float


class Clients(Protocol):
    """Provides the client for this process."""

    def get(self) -> Any: ...
    def close(self) -> None: ...


class AsyncClients(Protocol):
    """Provides the client for this event loop."""

    async def get(self) -> Any: ...
    async def aclose(self) -> None: ...


class OwnClients:
    """One client for each process, created on first use. It may be shared between threads."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._client: Any = None
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()

    def get(self) -> Any:
        if self._pid != os.getpid():
            # The parent's sockets stay the parent's, and its lock may be held by a thread that does not exist here.
            self._client = None
            self._reset()
        if self._client is None:
            # A session may be the caller's, and is not thread-safe.
            with self._mutex:
                if self._client is None:
                    self._client = self._make()
        return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            client.close()


class OwnAsyncClients:
    """One client for each event loop, created on first use, and closed when the loop ends at the latest."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._make = make
        self._homes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Home] = WeakKeyDictionary()

    async def get(self) -> Any:
        from asyncio import get_running_loop

        loop = get_running_loop()
        home = self._homes.get(loop)
        if home is None:
            self._forget_closed()
            home = self._homes[loop] = _Home(self._make)
        return await home.get()

    def _forget_closed(self) -> None:
        """Forget closed loops: the objects of a loop refer to it, and would keep it and its client alive forever."""
        for found in self._homes.keyrefs():
            loop = found()
            if loop is not None and loop.is_closed():
                self._homes.pop(loop, None)

    async def aclose(self) -> None:
        from asyncio import get_running_loop

        home = self._homes.pop(get_running_loop(), None)
        if home is not None:
            await home.aclose()


class _Home:
    """The client of one event loop."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        from asyncio import Lock

        self._make = make
        self._opening = Lock()
        self._client: Any = None
        self._living: AsyncIterator[Any] | None = None

    async def get(self) -> Any:
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._living = self._live()
                    self._client = await anext(self._living)
        return self._client

    async def _live(self) -> AsyncIterator[Any]:
        # A loop that ends closes its async generators: so the client is closed in its own loop, automatically.
        async with self._make() as client:
            yield client

    async def aclose(self) -> None:
        living, self._living, self._client = self._living, None, None
        if living is not None:
            await living.aclose()  # type: ignore[attr-defined]


class Brought:
    """The caller's own client: used as it is, and never closed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self) -> Any:
        return self._client

    def close(self) -> None:
        """Do nothing: it is the caller's."""


class AsyncBrought:
    """The caller's own aiobotocore client, which belongs to the caller's event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def get(self) -> Any:
        return self._client

    async def aclose(self) -> None:
        """Do nothing: it is the caller's."""


class OfResource:
    """The client of a boto3 resource, which uses Python types, behind the interface of a plain one."""

    def __init__(self, client: Any) -> None:
        from boto3.dynamodb.types import TypeDeserializer, TypeSerializer

        self._client = client
        self._python = TypeDeserializer().deserialize
        self._wire = TypeSerializer().serialize

    def __getattr__(self, action: str) -> Callable[..., Any]:
        send = getattr(self._client, action)

        def ask(**parameters: Any) -> Any:
            reply = send(**{name: self._asked(name, value) for name, value in parameters.items()})
            told: dict[str, Any] = {name: self._item(reply[name]) for name in REPLIED if reply.get(name)}
            if "Items" in reply:
                told["Items"] = [self._item(item) for item in reply["Items"]]
            return reply | told

        return ask

    def _asked(self, name: str, value: Any) -> Any:
        return {part: self._python(found) for part, found in value.items()} if name in VALUES else value

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        return {name: self._wire(value) for name, value in item.items()}


def own(settings: Settings) -> OwnClients:
    def make() -> Any:
        session = _imported("botocore.session").Session(profile=settings.profile)
        return session.create_client("dynamodb", **_options(settings, "botocore.config", "Config"))

    return OwnClients(make)


def own_async(settings: Settings) -> OwnAsyncClients:
    def make() -> AbstractAsyncContextManager[Any]:
        session = _imported("aiobotocore.session").AioSession(profile=settings.profile)
        made: AbstractAsyncContextManager[Any] = session.create_client(
            "dynamodb", **_options(settings, "aiobotocore.config", "AioConfig")
        )
        return made

    return OwnAsyncClients(make)


def check_sync_or_async(client: Any, *, is_async: bool) -> None:
    """Raise `UsageError` for a sync client on an async guard, or the reverse."""
    if _is_async_client(client) and not is_async:
        raise UsageError(f"{_name(client)} is async, but this is a Guard: use an AsyncGuard, or pass a boto3 client")
    if is_async and not _is_async_client(client):
        raise UsageError(
            f"{_name(client)} is sync, but this is an AsyncGuard: use a Guard, or pass an aiobotocore session or client"
        )


def brought(client: Any, settings: Settings) -> tuple[Clients, str | None]:
    """Return the clients for the caller's object, and the name of the table if the object has one."""
    check_sync_or_async(client, is_async=False)
    if _is_session(client):
        make = getattr(client, "create_client", None) or client.client
        return OwnClients(lambda: make("dynamodb", **_options(settings, "botocore.config", "Config"))), None
    meta = _checked_meta(client)
    if hasattr(meta, "client"):
        return Brought(OfResource(meta.client)), getattr(client, "name", None)
    return Brought(client), None


def brought_async(client: Any, settings: Settings) -> tuple[AsyncClients, str | None]:
    """Return the clients for an `AsyncGuard`; see `brought`."""
    check_sync_or_async(client, is_async=True)
    if _is_session(client):
        make = getattr(client, "create_client", None) or client.client
        return OwnAsyncClients(lambda: make("dynamodb", **_options(settings, "aiobotocore.config", "AioConfig"))), None
    if hasattr(_checked_meta(client), "client"):
        raise UsageError(f"{_name(client)}: pass the session, or a client that was made with client('dynamodb')")
    return AsyncBrought(client), None


def for_renewals(client: Any, settings: Settings) -> AsyncClients:
    """Return the clients for renewing claims: handlers may use every connection of the shared one.

    A sync client needs none: if its connections are all in use, botocore opens another.
    """
    if client is None:
        return own_async(settings)
    return brought_async(client, settings)[0] if _is_session(client) else OwnAsyncClients(lambda: _like(client))


def _like(client: Any) -> AbstractAsyncContextManager[Any]:
    """Return a client with the settings and credentials of this one, but with its own connections."""
    session = _imported("aiobotocore.session").AioSession()
    # The credentials object itself, which refreshes expired ones.
    session._credentials = client._request_signer._credentials
    made: AbstractAsyncContextManager[Any] = session.create_client(
        "dynamodb",
        region_name=client.meta.region_name,
        endpoint_url=client.meta.endpoint_url,
        verify=getattr(client._endpoint.http_session, "_verify", None),
        config=client.meta.config,
    )
    return made


def _checked_meta(client: Any) -> Any:
    """Return the metadata of a client or a resource; it has to be one of DynamoDB."""
    meta = getattr(client, "meta", None)
    model = getattr(getattr(meta, "client", client), "meta", None)
    service = getattr(getattr(model, "service_model", None), "service_name", None)
    if service != "dynamodb":
        raise UsageError(
            f"{_name(client)} is not of DynamoDB: pass a client made with client('dynamodb'), a Table of "
            "resource('dynamodb'), or a session"
        )
    return meta


def _is_async_client(client: Any) -> bool:
    roots = {kind.__module__.partition(".")[0] for kind in type(client).__mro__}
    return not roots.isdisjoint({"aiobotocore", "aioboto3"})


def _is_session(client: Any) -> bool:
    return hasattr(client, "create_client") or (hasattr(client, "client") and hasattr(client, "resource"))


def _options(settings: Settings, module: str, name: str) -> dict[str, Any]:
    config = getattr(_imported(module), name)(
        connect_timeout=settings.timeout,
        read_timeout=settings.timeout,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
        max_pool_connections=CONNECTIONS_MAX,
        tcp_keepalive=True,
    )
    named = {"region_name": settings.region, "endpoint_url": settings.endpoint_url}
    return {"config": config} | {option: value for option, value in named.items() if value is not None}


def _imported(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(module.partition(".")[0], "dynamodb") from error


def _name(client: Any) -> str:
    return f"{type(client).__module__}.{type(client).__qualname__}"
