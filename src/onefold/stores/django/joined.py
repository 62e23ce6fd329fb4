"""Django: inside the block of `transaction.atomic()` in which a connection is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onefold.errors import UsageError
from onefold.stores.django.connection import InsideLink, StoresLink, database_of
from onefold.stores.django.vendors import Place, place_of
from onefold.stores.sql.dialect import Ask, Reply
from onefold.stores.sql.joined import JoinedRecords
from onefold.stores.sql.orm import send_finding
from onefold.stores.sqlite import orm as sqlite
from onefold.transactions import Column


def join(connection: Any, record: Column | None, *, awaited: bool) -> JoinedRecords:
    """The store that works inside this connection's transaction. Its first operation says where there is none."""
    from django.db import connections
    from django.db.backends.base.base import BaseDatabaseWrapper

    if awaited:
        raise UsageError(
            "within(Django's connection): Django has no async transactions, so that an AsyncGuard cannot join one. "
            "Nothing ran. Use a Guard, in sync code"
        )
    # `django.db.connection` stands for whichever connection the thread has.
    wrapper = connection if isinstance(connection, BaseDatabaseWrapper) else connections[connection.alias]
    database = database_of(wrapper)
    if record is None:
        return JoinedRecords(database, CallersLink(wrapper))
    rows = database.sql.rows_of(record)
    link = CallersLink(wrapper) if rows.needs_tables else InsideLink(wrapper)
    return JoinedRecords(database._replace(sql=rows), link)


# Where the tables were found.
_found: set[Place] = set()


class CallersLink(InsideLink):
    """What is sent joins the caller's transaction; the first one finds the tables, or makes them."""

    _sent = False

    def send(self, ask: Ask) -> Reply:
        connection, inside = self.connection, InsideLink(self.connection)
        self.enter()
        if self.vendor.makes_tables_inside:
            sqlite.enter(connection.connection, self.run)
            return sqlite.looked_up(inside.send, ask)
        database, place, first = database_of(connection), place_of(connection), not self._sent
        reply = send_finding(ask, inside, database, _found, place, lambda: _beside(connection), first=first)
        self._sent = True
        return reply


@contextmanager
def _beside(connection: Any) -> Iterator[StoresLink]:
    other = connection.copy()
    try:
        yield StoresLink(other)
    finally:
        other.close()
