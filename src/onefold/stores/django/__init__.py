"""Records in Django's database: `django://default` names an alias of `DATABASES` in the settings.

A handler of `transactional` gets Django's connection, and its changes to models are in the same transaction. All other
operations commit at once: a claim that waited for the end of a request's transaction would be invisible to others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from onefold._checks import did_you_mean, not_installed, yes_or_no
from onefold._concurrency.generators import Flow
from onefold.errors import UsageError
from onefold.stores.base import Query
from onefold.stores.django.connection import (
    AtomicConnection,
    RenewalConnection,
    StoresConnection,
    beside,
    database_of,
    in_transaction,
)
from onefold.stores.django.kind import KIND as KIND
from onefold.stores.django.vendors import vendor_of
from onefold.stores.sql.connection import Connection
from onefold.stores.sql.joined import SqlTransaction
from onefold.stores.sql.pool import Pool, Reserve
from onefold.stores.sql.records import VERSION
from onefold.stores.sql.store import SqlStore
from onefold.stores.urls import options_of


class DjangoStore(SqlStore):
    """A `Store`, `Batching`, `Browsable` and `Joinable` on a database of Django's; safe to share between threads."""

    def __init__(self, alias: str = "default", *, auto_schema: bool = True, purge: bool = True) -> None:
        self.alias = alias
        self._pool_of_alias = DjangoPool(alias)
        database = database_of(connection_of(alias))._replace(auto_schema=auto_schema, purges=purge)
        super().__init__(database, self._pool_of_alias)

    def _look(self) -> Flow[None]:
        if not self._looked:
            yield from super()._look()
            # The server's version is known after the first connection.
            self.database = self.database._replace(sql=database_of(connection_of(self.alias)).sql)

    def _new_transaction(self) -> SqlTransaction:
        # A block of `transaction.atomic()` on this thread's connection.
        return SqlTransaction(self.database, AtomicPool(self.alias))

    def _batches_due(self, ended: int = 1) -> int:
        due = super()._batches_due(ended)
        if due and not self.database.sql.has_server and in_transaction(connection_of(self.alias)):
            # In the block of a TestCase: a file has one writer, and a purge on another connection would wait for the
            # block.
            return 0
        return due


def connection_of(alias: str) -> Any:
    """Return this thread's connection for an alias."""
    try:
        from django.core.exceptions import ImproperlyConfigured
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist
    except ImportError as error:
        raise not_installed("Django", "django") from error
    try:
        return connections[alias]
    except ConnectionDoesNotExist as error:
        known = sorted(connections)
        raise UsageError(
            f"django://{alias}: there is no such alias in DATABASES{did_you_mean(alias, known) or '.'} There are: "
            f"{', '.join(known)}"
        ) from error
    except ImproperlyConfigured as error:
        raise UsageError(f"django://{alias}: Django's settings are not there yet: {error}") from error


# The prefix of the names of our own threads: the doctor's, those of a scrape.
OUR_THREADS: Final = "onefold-"


class DjangoPool:
    """Lends connections outside any transaction: the thread's own, or a separate one.

    In a caller's transaction a claim would be invisible until its end. And a connection opened in a thread of ours
    would never be closed by Django, which closes connections at the end of a request.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._beside = Pool(self._connect)

    def _connect(self) -> StoresConnection:
        return StoresConnection(beside(connection_of(self._alias)))

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        own = connection_of(self._alias)
        if not in_transaction(own) and not threading.current_thread().name.startswith(OUR_THREADS):
            with self._own(own) as conn:
                yield conn
            return
        with self._beside.acquire() as conn:
            conn.connection.close_if_unusable_or_obsolete()
            try:
                yield conn
            finally:
                if conn.connection.settings_dict["CONN_MAX_AGE"] == 0:
                    # Django would not keep it either.
                    conn.close()

    @contextmanager
    def _own(self, connection: Any) -> Iterator[Connection]:
        conn = StoresConnection(connection)
        try:
            yield conn
        except BaseException:
            if conn.begun:
                conn.close()
            connection.close_if_unusable_or_obsolete()
            raise

    def drop_idle(self) -> None:
        """Close the idle connections."""
        self._beside.drop_idle()

    def reserve(self) -> Reserve:
        """Return a connection separate from those that Django keeps."""
        return Reserve(lambda: RenewalConnection(beside(connection_of(self._alias))))


class AtomicPool:
    """Lends the thread's own connection, for an atomic block of ours."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    @contextmanager
    def acquire(self) -> Iterator[Connection]:
        conn = AtomicConnection(connection_of(self._alias))
        try:
            yield conn
        finally:
            conn.close()

    def drop_idle(self) -> None:
        """Do nothing: a lost connection is closed by its block."""


def open_store(url: str) -> DjangoStore:
    """Open a store at `django://default`, with the options `?auto_schema=no&purge=no`."""
    alias, options = _parsed(url)
    return DjangoStore(alias, **options)


def open_async_store(url: str) -> NoReturn:
    """Raise `UsageError`: Django's connections are sync only."""
    raise UsageError(
        f"{url!r}: Django has no async transactions, so an AsyncGuard cannot use its connections. Use a Guard in "
        "sync code (sync_to_async), or an AsyncGuard with a URL of the same database"
    )


def check_url(url: str, *, is_async: bool) -> None:
    """Raise `UsageError` for a URL or an option that is wrong. Django's settings may not be there yet."""
    _parsed(url)
    if is_async:
        open_async_store(url)


def describe_schema(url: str) -> str:
    """Return the statements that create the tables; `manage.py migrate onefold` sends the same."""
    return open_store(url).database.sql.script()


def apply_schema(url: str) -> list[str]:
    """Create the tables, or upgrade them to this version."""
    alias, _ = _parsed(url)
    store = DjangoStore(alias)
    try:
        store.browse(Query(), 0)
    finally:
        store.close()
    return [f"{store.database.name}: Onefold's tables exist, version {VERSION}"]


def schema_versions(connection: Any) -> tuple[tuple[str, ...], ...]:
    """Return the statements that create the tables on this Django connection, version by version."""
    return vendor_of(connection).sql.versions


OPTIONS: Final = ("auto_schema", "purge")


def _parsed(url: str) -> tuple[str, dict[str, Any]]:
    parts = urlsplit(url)
    if not parts.netloc or parts.path or parts.fragment:
        raise UsageError(f"{url!r}: write django://ALIAS, with an alias of DATABASES, such as django://default")
    options = options_of(parts.query, OPTIONS, url)
    return parts.netloc, {name: yes_or_no(word, name) for name, word in options.items()}
