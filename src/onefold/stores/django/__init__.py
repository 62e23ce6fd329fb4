"""Django's database as the place of the records: `django://default` names the alias in the settings.

A handler of `transactional` gets Django's connection, and what it does by models is in the same transaction. All other
operations commit at once: a claim that waited for the end of a request's transaction would be seen by nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from onefold._checks import did_you_mean, yes_or_no
from onefold._concurrency.generators import Work
from onefold._model import Claim
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
from onefold.stores.django.vendors import vendor_of
from onefold.stores.kinds import StoreKind
from onefold.stores.sql.connection import Connection
from onefold.stores.sql.joined import SqlTransaction
from onefold.stores.sql.pool import Pool, Reserve
from onefold.stores.sql.records import VERSION
from onefold.stores.sql.store import SqlStore
from onefold.stores.urls import options_of

KIND: Final = StoreKind(name="Django", has_transactions=True)


class DjangoStore(SqlStore):
    """A `Store`, `Batching`, `Browsable` and `Joinable` on a database of Django's; safe to share between threads."""

    def __init__(self, alias: str = "default", *, auto_schema: bool = True, purge: bool = True) -> None:
        self.alias = alias
        self._pool_of_alias = DjangoPool(alias)
        database = database_of(connection_of(alias))._replace(auto_schema=auto_schema, purges=purge)
        super().__init__(database, self._pool_of_alias)

    def _look(self) -> Work[None]:
        if not self._looked:
            yield from super()._look()
            # Which server it is shows with the first connection.
            self.database = self.database._replace(sql=database_of(connection_of(self.alias)).sql)

    def _new_transaction(self) -> SqlTransaction:
        # A block of `transaction.atomic()` on the connection that this thread has.
        return SqlTransaction(self.database, AtomicPool(self.alias))

    def _purge_a_little(self, ended: int = 1, claims: Sequence[Claim] = ()) -> Work[None]:
        connection = connection_of(self.alias)
        if connection.vendor == "sqlite" and in_transaction(connection):
            # In the block of a TestCase: a file has one writer, and a purge beside would wait for the block's end.
            return
        yield from super()._purge_a_little(ended, claims)


def connection_of(alias: str) -> Any:
    """The connection that this thread has under this alias."""
    try:
        from django.core.exceptions import ImproperlyConfigured
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist
    except ImportError as error:
        raise UsageError("django://: Django is not installed. pip install 'onefold[django]'") from error
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


# How the names of our own threads begin: the doctor's, those of a scrape.
OUR_THREADS: Final = "onefold-"


class DjangoPool:
    """Lends connections that are in nobody's transaction: the thread's own, or one beside it.

    In a caller's transaction a claim would be seen by nobody until its end. And what a thread of ours would connect,
    Django never closes: it does so at the end of a request.
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
                    # Django, too, would not keep it.
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
        """Close what nobody uses."""
        self._beside.drop_idle()

    def reserve(self) -> Reserve:
        """Return a connection beside those that Django keeps."""
        return Reserve(lambda: RenewalConnection(beside(connection_of(self._alias))))


class AtomicPool:
    """Lends the thread's own connection, for a block of ours."""

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
        """Nothing: a lost connection is closed by its block."""


def open_store(url: str) -> DjangoStore:
    """`django://default`, with `?auto_schema=no&purge=no`."""
    alias, options = _parsed(url)
    return DjangoStore(alias, **options)


def open_async_store(url: str) -> NoReturn:
    """Refused: Django's connections cannot be awaited."""
    raise UsageError(
        f"{url!r}: Django has no async transactions, so that an AsyncGuard cannot use its connections. Use a Guard in "
        "sync code (sync_to_async), or an AsyncGuard with a URL of the same database"
    )


def describe_schema(url: str) -> str:
    """The statements that make the tables; `manage.py migrate onefold` sends the same."""
    return open_store(url).database.sql.script()


def apply_schema(url: str) -> list[str]:
    """Make the tables, or bring them to the form of this version."""
    alias, _ = _parsed(url)
    store = DjangoStore(alias)
    try:
        store.browse(Query(), 0)
    finally:
        store.close()
    return [f"{store.database.name}: the tables of Onefold are there, version {VERSION}"]


def schema_versions(connection: Any) -> tuple[tuple[str, ...], ...]:
    """Return the statements that make the tables on this connection of Django's, version by version."""
    return vendor_of(connection).sql.versions


OPTIONS: Final = ("auto_schema", "purge")


def _parsed(url: str) -> tuple[str, dict[str, Any]]:
    parts = urlsplit(url)
    if not parts.netloc or parts.path or parts.fragment:
        raise UsageError(f"{url!r}: write django://ALIAS, with an alias of DATABASES, such as django://default")
    options = options_of(parts.query, OPTIONS, url)
    return parts.netloc, {name: yes_or_no(word, name) for name, word in options.items()}
