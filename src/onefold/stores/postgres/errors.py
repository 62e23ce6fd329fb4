"""The meaning of PostgreSQL's error codes. By code, never by text: messages come in the server's language."""

from __future__ import annotations

from typing import Final

from onefold.stores.sql.connection import ErrorClass, ErrorInfo

_POOLER: Final = (
    "there is a pooler such as PgBouncer in between, where prepared statements do not survive. Add prepare=no"
)
_READ_ONLY: Final = (
    "it is read-only. Is this a replica? Name the primary, or add target_session_attrs=read-write. Or is "
    "default_transaction_read_only on?"
)
_PERMISSION: Final = (
    "this user lacks a permission. Grant SELECT, INSERT, UPDATE and DELETE on onefold_records and SELECT on "
    "onefold_schema; and to create them, CREATE on the schema, or let another user run "
    "`onefold schema --store URL --apply`"
)

# A statement that fails, so that the server refuses to commit the transaction; its log shows this text.
SPOILING: Final = "SELECT 'Onefold: a delivery was interrupted in this transaction, which must not be committed'::int"

# A row stayed locked for longer than lock_timeout.
LOCKED: Final = "55P03"

# The code itself, or the prefix of a class of codes.
MEANINGS: Final = {
    "40001": ErrorInfo(ErrorClass.CONFLICT, "concurrent transactions conflicted (serialization failure)"),
    "40P01": ErrorInfo(ErrorClass.CONFLICT, "concurrent transactions waited for each other (deadlock)"),
    "42P01": ErrorInfo(ErrorClass.NO_TABLES, "there are no Onefold tables. Run `onefold schema --store URL --apply`"),
    "40003": ErrorInfo(ErrorClass.LOST, "the server does not know the outcome of the statement"),
    "08": ErrorInfo(ErrorClass.LOST, "the connection was lost"),
    "57P03": ErrorInfo(ErrorClass.LOST, "the server is starting up, shutting down or recovering"),
    "57P": ErrorInfo(ErrorClass.LOST, "the server ended the connection"),
    "25P03": ErrorInfo(ErrorClass.LOST, "the server ended a transaction that was idle for too long"),
    "25P04": ErrorInfo(ErrorClass.LOST, "the server ended a transaction that took too long"),
    "25006": ErrorInfo(ErrorClass.READ_ONLY, _READ_ONLY),
    "26000": ErrorInfo(ErrorClass.DOWN, _POOLER),
    "42P05": ErrorInfo(ErrorClass.DOWN, _POOLER),
    "28": ErrorInfo(
        ErrorClass.DOWN, "the server does not know this user, or the password is wrong. Check both in the URL"
    ),
    "3D000": ErrorInfo(ErrorClass.DOWN, "there is no such database. Create it, or name another one"),
    "3F000": ErrorInfo(
        ErrorClass.DOWN, "this user's search_path has no schema that it may use. Grant USAGE, or name another"
    ),
    "42501": ErrorInfo(ErrorClass.DOWN, _PERMISSION),
    "53100": ErrorInfo(ErrorClass.DOWN, "the disk is full. Free some space, or purge records"),
    "53200": ErrorInfo(ErrorClass.DOWN, "the server has no memory left"),
    "53300": ErrorInfo(
        ErrorClass.DOWN, "the server accepts no more connections. Lower pool_size, or raise max_connections"
    ),
    "53": ErrorInfo(ErrorClass.DOWN, "the server has no room for it"),
    "55P03": ErrorInfo(ErrorClass.DOWN, "another transaction holds the record for longer than lock_timeout"),
    "57014": ErrorInfo(ErrorClass.DOWN, "the server cancelled it: statement_timeout, or an administrator"),
    "58": ErrorInfo(ErrorClass.DOWN, "the server's own system failed. Look at its log"),
    "XX": ErrorInfo(ErrorClass.DOWN, "the server failed. Look at its log"),
}


def meaning(code: str, says: str) -> ErrorInfo:
    """Classify an error by its code, and quote the server's message for people."""
    for length in (5, 3, 2):
        found = MEANINGS.get(code[:length])
        if found is not None:
            return ErrorInfo(found.kind, f"{found.message}. The server says: {one_line(says)}")
    return ErrorInfo(ErrorClass.MISTAKE, f"the server says: {one_line(says)}")


def code_of(error: BaseException) -> str | None:
    """Return the server's code of an error, including one that a library has wrapped."""
    seen: BaseException | None = error
    while seen is not None:
        found = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if found is not None:
            return str(found)
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None


def one_line(text: str) -> str:
    """Return the first line only: later lines quote statements."""
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else "nothing"
