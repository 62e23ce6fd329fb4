"""A Django project whose databases come and go with the tests, and a wallet in each of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

import django
from django.apps import apps
from django.conf import settings
from django.db import connections, transaction
from django.db.utils import ConnectionHandler

from onefold import Guard, Outcome, RecordColumn
from onefold.stores.django.joined import _found
from tests.stores.sqlalchemy.wallet import DATABASES, Ledger
from tests.wallet import never_opened

ENGINES = {"sqlite": "sqlite3", "postgres": "postgresql", "mariadb": "mysql"}

_numbers = itertools.count()


@contextmanager
def project() -> Iterator[None]:
    """Django is configured while it lasts; then it is as it was before."""
    import pymysql

    # Django knows mysqlclient only, and this is its stand-in.
    pymysql.install_as_MySQLdb()
    with put_back():
        if not settings.configured:
            configure({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
        yield


@contextmanager
def put_back() -> Iterator[None]:
    """Let somebody configure Django; then it is as it was before, but for the applications that it has loaded."""
    before, known = settings._wrapped, set(apps.all_models)
    try:
        yield
    finally:
        if settings.configured:
            for alias in list(connections):
                disconnect(connections[alias])
                del connections[alias]
        settings._wrapped = before
        connections.__dict__.pop("settings", None)
        for label in set(apps.all_models) - known - set(apps.app_configs):
            del apps.all_models[label]
        apps.clear_cache()


def disconnect(connection: Any) -> None:
    connection.close()
    if connection.connection is not None:
        # Django itself never closes a database in memory.
        connection.connection.close()


def configure(databases: dict[str, Any]) -> None:
    settings.configure(DATABASES=databases, INSTALLED_APPS=["onefold.django"], USE_TZ=True)
    django.setup()


def described(database: str, address: str, **options: Any) -> dict[str, Any]:
    """The database as the settings have it."""
    engine = f"django.db.backends.{ENGINES[database]}"
    if database == "sqlite":
        return {"ENGINE": engine, "NAME": address, **options}
    parts = urlsplit(address)
    return {
        "ENGINE": engine,
        "NAME": parts.path.removeprefix("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname,
        "PORT": parts.port,
        **options,
    }


@contextmanager
def alias_of(database: str, address: str, **options: Any) -> Iterator[str]:
    """A database of the project, under a name of its own."""
    alias = f"{database}_{next(_numbers)}"
    wanted = {"default": {}, alias: described(database, address, **options)}
    connections.settings[alias] = ConnectionHandler(wanted).settings[alias]
    # The tests empty a database that they have used before.
    _found.clear()
    yield alias
    connections[alias].close()
    del connections[alias], connections.settings[alias]


@cache
def payments() -> Any:
    """A model, which can be made only while Django is configured."""
    from django.db import models

    class Payment(models.Model):  # type: ignore[misc]
        idempotency_key = models.CharField(max_length=50, primary_key=True)
        tenant = models.CharField(max_length=50)
        amount = models.IntegerField()

        class Meta:
            app_label = "shop_of_the_tests"
            managed = False
            db_table = "payments"

    return Payment


class Counter:
    """A database of a Django project, and a guard that joins its transactions."""

    def __init__(self, alias: str, ledger: Ledger) -> None:
        self.alias = alias
        self.ledger = ledger
        self.guard = Guard(never_opened)

    @property
    def connection(self) -> Any:
        return connections[self.alias]

    def atomic(self, **options: Any) -> Any:
        return transaction.atomic(using=self.alias, **options)

    def within(self, key: Any, work: Any, record: RecordColumn | None = None, **options: Any) -> Outcome[Any]:
        return self.guard.within(self.connection, record=record).run("credit", key, work, **options)

    def execute(self, statement: str) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def add(self, amount: int = 10) -> None:
        self.execute(f"UPDATE wallet SET balance = balance + {amount} WHERE account = 'asha'")

    def pay(self, key: str = "pay_1") -> None:
        payments()(idempotency_key=key, tenant="", amount=500).save(using=self.alias, force_insert=True)


def ledger_at(request: Any, database: str) -> Ledger:
    return Ledger(database, str(request.getfixturevalue(DATABASES[database][0])))
