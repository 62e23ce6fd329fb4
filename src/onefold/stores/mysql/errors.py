"""The meaning of MySQL's and MariaDB's error numbers. By number: texts differ, and may hold a key."""

from __future__ import annotations

from typing import Final

from onefold.stores.sql.connection import ErrorClass, ErrorInfo

# Our table has one unique index, so an INSERT that fails with this number has met a record.
DUPLICATE: Final = 1062

# There is no such savepoint: the transaction in which it was set is over.
NO_SAVEPOINT: Final = 1305

# A row stayed locked for longer than the statement waits. The second number is MySQL's for NOWAIT.
LOCKED: Final = frozenset({1205, 3572})

# The drivers' own numbers for an unreachable server and for failed TLS.
NOT_REACHED: Final = 2003
TLS_FAILED: Final = 2026

# After these the server has rolled back the whole transaction, not only the statement: a deadlock, or a row that
# changed since the snapshot (MariaDB, innodb_snapshot_isolation).
UNDOING: Final = frozenset({1213, 1020})

_LOST: Final = "the connection was lost"
_DENIED: Final = (
    "this user lacks a permission. Nothing ran. Grant SELECT, INSERT, UPDATE and DELETE on Onefold's tables, and "
    "CREATE, or create them as another user with the command `onefold schema --store URL --apply`"
)
_READ_ONLY: Final = (
    "the server accepts no writes: it is read-only, perhaps a replica. Nothing ran. Name the primary in the URL"
)
_FULL: Final = "the server has no room left. Nothing was written. Free some space, or purge records"
_CROWDED: Final = (
    "the server has no connection left for us. Nothing ran. Lower pool_size, or raise max_connections on the server"
)
_LOOK: Final = "Nothing ran. Check that it is running, and the host and port in the URL"
_ABSENT: Final = f"the server cannot be reached. {_LOOK}"
_REFUSED: Final = "the server refuses this user or its password. Nothing ran. Check the URL, and who may connect"
_PLUGIN: Final = (
    "the server requires an authentication method that this driver does not have here. Nothing ran. Use TLS "
    "(ssl_mode=required), or `pip install cryptography`"
)
_TLS: Final = (
    "no encrypted connection could be made. Nothing ran. Check ssl_mode and ssl_ca in the URL, and the server's TLS"
)
_PACKET: Final = (
    "the request is larger than the server's max_allowed_packet. Raise that to twice the largest result and more, or "
    "lower max_result_bytes of the policy"
)
_TOO_LONG: Final = "the server has ended the statement because it took too long, or somebody has killed it"
_CONFLICT: Final = "conflict with another transaction: a deadlock, or a row that was locked for too long"
_NO_DATABASE: Final = "there is no such database. Nothing ran. Create it, or name another one in the URL"
_NO_TABLES: Final = "Onefold's tables do not exist. Create them with the command `onefold schema --store URL --apply`"

MEANINGS: Final[dict[int, ErrorInfo]] = {
    number: ErrorInfo(kind, message)
    for kind, message, numbers in (
        (ErrorClass.LOST, _LOST, (0, 1053, 1152, 1156, 1157, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 2014, 2055)),
        (ErrorClass.LOST, _LOST, (3169, 4031)),
        # 1412: the table is newer than the snapshot. 3101: another member of the cluster was faster.
        (ErrorClass.CONFLICT, _CONFLICT, (1020, 1205, 1213, 1412, 1613, 1614, 3101)),
        (ErrorClass.NO_TABLES, _NO_TABLES, (1146,)),
        (ErrorClass.DOWN, _REFUSED, (1045, 1130, 1698, 1820, 1862)),
        (ErrorClass.DOWN, _NO_DATABASE, (1046, 1049)),
        (ErrorClass.DOWN, _DENIED, (1044, 1142, 1143, 1227, 1370)),
        (ErrorClass.READ_ONLY, _READ_ONLY, (1290, 1836)),
        # A transaction that was begun so.
        (ErrorClass.DOWN, _READ_ONLY, (1792,)),
        (ErrorClass.DOWN, _FULL, (1021, 1037, 1038, 1041, 1114)),
        (ErrorClass.DOWN, _CROWDED, (1040, 1129, 1203, 1226)),
        (ErrorClass.DOWN, _ABSENT, (1047, 2002, 2003, 2005)),
        (ErrorClass.DOWN, _PLUGIN, (1251, 2059, 2061)),
        (ErrorClass.DOWN, _TLS, (1043, 2026, 3159)),
        (ErrorClass.DOWN, _PACKET, (1153,)),
        (ErrorClass.DOWN, _TOO_LONG, (1317, 1969, 3024)),
    )
    for number in numbers
}


def number_of(error: BaseException) -> int | None:
    """Return the server's or the driver's number of an error, including one that a library has wrapped."""
    found = getattr(error, "orig", None) or error
    first = found.args[0] if found.args else None
    return first if isinstance(first, int) else None


def meaning(error: BaseException) -> ErrorInfo:
    """Classify an error of the driver."""
    number = number_of(error)
    if number is None:
        # The driver and the server are out of sync: packets out of order.
        return ErrorInfo(ErrorClass.LOST, _LOST)
    if number == NOT_REACHED and (why := _why(error)):
        return ErrorInfo(ErrorClass.DOWN, f"the server cannot be reached: {why}. {_LOOK}")
    known = MEANINGS.get(number)
    return known or ErrorInfo(ErrorClass.MISTAKE, f"the database answered with error {number}")


def not_connected(error: Exception, cause: BaseException | None = None) -> tuple[int, str]:
    """Return number and text for an error while connecting, when nothing can have been lost."""
    import ssl

    number = number_of(error)
    if isinstance(cause, ssl.SSLError):
        number = TLS_FAILED
    elif number is None or meaning(error).kind is ErrorClass.LOST:
        number = NOT_REACHED
    return number, _why(error) or (str(cause) if cause is not None else "the connection could not be made")


def _why(error: BaseException) -> str:
    """Return the driver's reason for a failed connection; it contains no key and no password."""
    found = getattr(error, "orig", None) or error
    return " ".join(str(found.args[1]).split()) if len(found.args) > 1 else ""
