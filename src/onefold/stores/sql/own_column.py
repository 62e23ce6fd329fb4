"""`RecordColumn` over any connection: the caller's own row is the record. It exists or not; the handler writes it.

That a row exists after the handler proves nothing: a handler that writes it with `INSERT ... ON CONFLICT DO NOTHING`
carries on beside another delivery's row. So a claim takes a lock that only one delivery of a key can hold and that the
database releases with the transaction, and then looks. Each database has a module with its lock. After the handler the
row has to be there; a table that has nothing else to fill gets it from us. Where the row has columns for the result and
the fingerprint, they are filled then.

The operations are flows like those of a dialect, so that they are written once for every driver, sync and async. One
`Rows` serves one delivery, or one batch. Nothing learned about a table is kept for the next one: tables change, and so
does the schema in which a session looks for them.
"""

# ruff: noqa: S608 - the names in the statements were checked by `RecordColumn`, and are never values
# ruff: noqa: ARG002 - a row of the caller's has no leases and no memories

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from onefold._model import Address, Claim, Ending, Entry, Gone, Record, Released, State
from onefold.errors import InProgress, UsageError
from onefold.stores.sql.dialect import Dialect, Reply, SqlFlow, SqlRequest
from onefold.stores.sql.row_values import (
    Catalog,
    Form,
    Found,
    Kept,
    Result,
    Row,
    form_of,
    read_fingerprint,
    read_result,
    stored_fingerprint,
    stored_result,
)
from onefold.transactions import RecordColumn, not_unique

# When to retry if another delivery of the same key is in the way.
RETRY_AFTER: Final = 1.0


class Rows(Dialect):
    """The operations of a store on the caller's own rows. Each database adds its lock."""

    catalog: Catalog
    # Whether a record of ours is written as well.
    needs_tables: bool = False
    _found: Found

    def __init__(self, column: RecordColumn) -> None:
        self._column = column
        self._fingerprints: dict[Address, bytes | None] = {}

    def claim(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        address, table = entry.address, self._column.table
        if replacing is not None:
            raise UsageError(
                f"{address.operation} [key {address.digest}]: bypass=True cannot run it again, because its row in "
                f"{table} is there. Nothing ran. Delete the row before"
            )
        self._check_scope(address)
        self._fingerprints[address] = entry.fingerprint
        row = yield from self._was_written(entry)
        return None if row is None else self._record(address, row)

    def read(self, address: Address) -> SqlFlow[Record | None]:
        self._check_scope(address)
        yield from self._find()
        row = yield from self._is_there(address)
        return None if row is None else self._record(address, row)

    def _record(self, address: Address, row: Row) -> Record:
        """Return the record that the row is. Its age is not known."""
        return Record(
            address=address,
            token=b"",
            revision=1,
            state=State.DONE,
            attempt=1,
            lease_left=0.0,
            ttl_left=math.inf,
            age=0.0,
            fingerprint=row.fingerprint,
            result=row.result.kept,
            omitted=row.result.omitted,
            remark=f"the record is the row in {self._column.table}",
        )

    def finish_joined(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        if not (yield from self.unmark(claim)):
            return False
        if (yield from self._is_there(claim.address)) is None:
            yield from self._write(claim.address, ending)
        else:
            yield from self._fill(claim.address, ending)
        return True

    def release(self, claim: Claim, released: Released | None = None) -> SqlFlow[bool]:
        yield from ()
        return True

    def _was_written(self, entry: Entry) -> SqlFlow[Row | None]:
        """Lock the key against other deliveries; return its row, if it already exists."""
        raise NotImplementedError(f"{type(self).__name__} has to take a lock, and look")

    def _is_there(self, address: Address, after: str = "") -> SqlFlow[Row | None]:
        """Return the row with exactly this key."""
        found = self._found
        read = "".join(f", {kept.read}" for kept in found.kept.values())
        statement = f"SELECT {found.exact}{read} FROM {found.table} WHERE {found.condition}{after}"
        reply: Reply = yield SqlRequest(statement, self._values(address), rows=True)
        if not reply.rows:
            return None
        exact, *cells = reply.rows[0]
        if not exact:
            yield from self._refuse_merged(address)
        there = dict(zip(found.kept, cells, strict=True))
        result, fingerprint = found.kept.get("result"), found.kept.get("fingerprint")
        return Row(
            Result() if result is None else read_result(there["result"], result.form),
            None if fingerprint is None else read_fingerprint(there["fingerprint"], fingerprint.form),
        )

    def _fill(self, address: Address, ending: Ending) -> SqlFlow[None]:
        """Keep the result and the fingerprint in the handler's row."""
        found, filled = self._found, self._filled(address, ending)
        if not found.kept:
            return
        assigned = ", ".join(f"{self._quoted(kept.column)} = {kept.write}" for kept in found.kept.values())
        statement = f"UPDATE {found.table} SET {assigned} WHERE {found.condition}"
        reply = yield from self._put(address, SqlRequest(statement, self._values(address) | filled), {})
        if reply.written == 0 and self.catalog.counts_matched:
            raise self._unfit(address, {})

    def _write(self, address: Address, ending: Ending) -> SqlFlow[None]:
        """Write the row for a handler that did not, unless only the handler can fill its other columns."""
        found, filled = self._found, self._filled(address, ending)
        unfilled = yield from self._unfilled()
        if unfilled:
            yield from self._refuse_unwritten(address, unfilled)
        names = self._names
        written = {part: self.catalog.value.format(name=name, type=found.types[name]) for name, part in names.items()}
        written |= {kept.column: kept.write for kept in found.kept.values()}
        statement = (
            f"INSERT INTO {found.table} ({', '.join(map(self._quoted, written))}) "
            f"VALUES ({', '.join(written.values())}){self.catalog.unless_there}"
        )
        reply = yield from self._put(address, SqlRequest(statement, self._values(address) | filled), names)
        # The column may have changed the key; a trigger may have done anything.
        if (yield from self._is_there(address)) is None:
            yield from self._refuse_unwritten(address, [])
        if reply.written == 0 and not (yield from self._is_own(address)):
            raise self._written_by_another(address)

    def _is_own(self, address: Address) -> SqlFlow[bool]:
        """Return whether this transaction has written the row, although the database has not counted it."""
        yield from ()
        return False

    def _put(self, address: Address, request: SqlRequest, own: dict[str, str]) -> SqlFlow[Reply]:
        """Send what writes the row; name the columns that may not take their values, such as our `own`."""
        try:
            reply: Reply = yield request
        except Exception as error:
            if any(self._is_duplicate(seen) for seen in causes(error)):
                yield from self._refuse_unwritten(address, [])
            if any(self._refuses_value(seen) or self._refuses_column(seen) for seen in causes(error)):
                raise self._unfit(address, own) from error
            raise
        return reply

    def _is_duplicate(self, error: BaseException) -> bool:
        """Return whether an INSERT has met another row with its key."""
        return False

    def _refuses_value(self, error: BaseException) -> bool:
        """Return whether a column does not take a value: it is too long, or breaks a constraint."""
        raise NotImplementedError(f"{type(self).__name__} has to tell an unfit value from other errors")

    def _refuses_column(self, error: BaseException) -> bool:
        """Return whether a column or its table takes no value from Onefold: the database generates it, say."""
        return False

    def _filled(self, address: Address, ending: Ending) -> dict[str, Any]:
        """Return the values of the columns for the result and the fingerprint."""
        kept = self._found.kept
        filled: dict[str, Any] = {}
        if "result" in kept:
            filled["result"] = stored_result(ending, kept["result"].form)
        if "fingerprint" in kept:
            filled["fingerprint"] = stored_fingerprint(self._fingerprints.get(address), kept["fingerprint"].form)
        return filled

    def _unfilled(self) -> SqlFlow[list[str]]:
        """Return the columns that only the handler can fill."""
        statement, values = self.catalog.unfilled, {"table": self._column.table, "schema": self._found.schema}
        used = {name: value for name, value in values.items() if f":{name}" in statement}
        reply: Reply = yield SqlRequest(statement, used, rows=True)
        named = {self._fold(name) for name in self._column[1:] if name}
        return [name for (name,) in reply.rows if self._fold(name) not in named]

    def _values(self, address: Address) -> dict[str, Any]:
        return {"key": address.key} | ({"scope": address.scope} if self._column.scope else {})

    def _refuse_unwritten(self, address: Address, unfilled: list[str]) -> SqlFlow[NoReturn]:
        """Raise the error for a row that the handler has not written, and Onefold cannot write."""
        column, verb = self._column, "has" if len(unfilled) == 1 else "have"
        others = f"Onefold writes it only if all other columns have defaults; {', '.join(unfilled)} {verb} none"
        why = (
            others
            if unfilled
            else "Onefold's own is not there, either: a trigger or a policy keeps it out, or changes it"
        )
        yield from ()
        raise _about(
            address,
            f"the handler has to write the row whose {column.table}.{column.name} is the key, and it did not"
            f" ({why}). Roll back, and deliver it again",
        )

    def _unfit(self, address: Address, own: dict[str, str]) -> UsageError:
        columns = [*own.values(), *(f"{kept.column} ({kept.type})" for kept in self._found.kept.values())]
        return _about(
            address,
            f"{self._column.table} does not take what has to be written into {' and '.join(columns)}. Roll back, and "
            "deliver it again. A key needs text of 255 characters, and so does a fingerprint; a result needs JSON, or "
            "text without a limit, or keep_result=False. No generated column, trigger, rule or policy of row level "
            "security may be in the way; nor a DEFERRABLE constraint, unless the handler writes the row",
        )

    def _refuse_merged(self, address: Address) -> SqlFlow[NoReturn]:
        """Raise the error for a key that the column changes, or confuses with another one."""
        column, there = self._column, (yield from self._columns())
        type_ = there.get(self._fold(column.name), "")
        raise _about(
            address,
            f"{column.table}.{column.name} ({type_}) treats this key as "
            "equal to another one, whose row is there, or changes it when it is stored. Roll back. Use a column of "
            "text that compares every character, as with a binary collation, or bring the keys into the form in which "
            "the database gives them back",
        )

    def _unsuited(self, address: Address, types: dict[str, str]) -> UsageError:
        """Create the error for a key, or a tenant, that is no value of the column's type."""
        table, names = self._column.table, self._names
        columns = " or ".join(f"{table}.{names[name]} ({type_})" for name, type_ in types.items())
        return _about(address, f"this is no value of {columns}. Roll back. Use a column of text for keys from outside")

    def _written_by_another(self, address: Address) -> InProgress:
        column, error = self._column, InProgress.about(address, retry_after=RETRY_AFTER)
        message = (
            f"{address.operation} [key {address.digest}]: the row in {column.table} whose {column.name} is the key "
            "was written by another transaction, not by this handler. Roll back, and deliver it again: then it is "
            "replayed"
        )
        error.args = (message,)
        return error

    def _check_scope(self, address: Address) -> None:
        column = self._column
        if bool(address.scope) != (column.scope is not None):
            raise UsageError(
                f"record={column!r} and a delivery with {'a' if address.scope else 'no'} scope: both "
                "have one, or neither. Name the tenant's column with RecordColumn(..., scope=...), and the tenant "
                "with scope="
            )

    def _find(self) -> SqlFlow[None]:
        """Find the table and its unique index: without one, the database would accept two rows with one key."""
        replies = []
        for request in self._finding():
            replies.append((yield request))  # noqa: PERF401 - no comprehension can yield
        yield from self._take(*replies)

    def _finding(self) -> list[SqlRequest]:
        catalog, table = self.catalog, {"table": self._column.table}
        statements = [catalog.unique, *([catalog.columns] if self._keeps else [])]
        return [SqlRequest(statement, table, rows=True) for statement in statements]

    @property
    def _names(self) -> dict[str, str]:
        """Return the names of the columns for the key and the scope."""
        return {"key": self._column.name} | ({"scope": self._column.scope} if self._column.scope else {})

    @property
    def _keeps(self) -> dict[str, str]:
        """Return the names of the columns for the result and the fingerprint."""
        column = self._column
        return {
            role: name
            for role, name in (("result", column.result), ("fingerprint", column.fingerprint))
            if name is not None
        }

    def _take(self, reply: Reply, described: Reply | None = None) -> SqlFlow[None]:
        column = self._column
        wanted = {self._fold(name): name for name in (column.name, column.scope) if name}
        unique: dict[str, set[str | None]] = {}
        types: dict[str, str] = {}
        schema = ""
        for schema, index, name, type_ in reply.rows:  # noqa: B007 - it is the same in all of them
            unique.setdefault(index, set()).add(name and self._fold(name))
            types[self._fold(name or "")] = type_
        indexes = frozenset(index for index, columns in unique.items() if columns == set(wanted))
        there = {} if described is None else {self._fold(name): type_ for name, type_ in described.rows}
        keeps = {self._fold(name): name for name in self._keeps.values()}
        if not indexes or keeps.keys() - there:
            raise not_unique(column, wanted | keeps, there or (yield from self._columns()), unique=bool(indexes))
        self._found = self._stated(schema, indexes, types, there)

    def _columns(self) -> SqlFlow[dict[str, str]]:
        """Return the columns of the table, with their types as text."""
        reply: Reply = yield SqlRequest(self.catalog.columns, {"table": self._column.table}, rows=True)
        return {self._fold(name): described for name, described in reply.rows}

    def _stated(self, schema: str, indexes: frozenset[str], types: dict[str, str], described: dict[str, str]) -> Found:
        column, catalog, names = self._column, self.catalog, self._names
        types = {name: types[self._fold(part)] for name, part in names.items()}
        parts = [{"column": self._quoted(part), "name": name, "type": types[name]} for name, part in names.items()]
        table = self._quoted(column.table)
        # Keep a schema out of the statement whose name some driver would read as a placeholder.
        plain = schema and not set(schema) & set(":%?")
        return Found(
            f"{self._quoted(schema)}.{table}" if plain else table,
            " AND ".join(catalog.equal.format(**part) for part in parts),
            " AND ".join(catalog.exact.format(**part) for part in parts),
            indexes,
            types,
            schema,
            {role: self._kept(role, name, described[self._fold(name)]) for role, name in self._keeps.items()},
        )

    def _kept(self, role: str, name: str, described: str) -> Kept:
        catalog, form, quoted = self.catalog, self._form(described), self._quoted(name)
        read = quoted if form.is_bytes else catalog.read.format(column=quoted)
        write = catalog.write_bytes if form.is_bytes else catalog.write_json if form.is_json else catalog.write
        return Kept(name, described, form, read, write.format(name=role, type=described.lower()))

    def _form(self, described: str) -> Form:
        """Return the form of values in a column of this type."""
        return form_of(described)

    def _quoted(self, name: str) -> str:
        # Quoted, because a table may be called `order`. The schema's name was not checked.
        quote = self.catalog.quote
        return f"{quote}{name.replace(quote, 2 * quote)}{quote}"

    def _fold(self, name: str) -> str:
        return name.lower() if self.catalog.folds_case else name


def _about(address: Address, text: str) -> UsageError:
    error = UsageError(f"{address.operation} [key {address.digest}]: {text}")
    error.operation, error.key, error.scope = address.operation, address.key, address.scope
    return error


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
