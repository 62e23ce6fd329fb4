"""MySQL's and MariaDB's dialects: one table, and two ways to find out who won a claim.

MariaDB reports it with the write itself (RETURNING). MySQL cannot, and the row count of its upsert depends on a flag of
the connection, which SQLAlchemy and Django set: so a plain INSERT is tried, and error 1062 means that a record is in
the way. Never INSERT IGNORE, which would ignore all other problems, too.
"""

# ruff: noqa: S608 - statements are made of the names in `records`, and of values as hexadecimal digits

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from onefold._model import (
    KEY_MAX,
    OPERATION_MAX,
    SCOPE_MAX,
    Address,
    Claim,
    Close,
    Ending,
    Entry,
    Gone,
    Record,
    Released,
    State,
)
from onefold.stores.base import Query
from onefold.stores.mysql.errors import NO_SAVEPOINT, number_of
from onefold.stores.mysql.statements.fragments import ADDRESSED, IN_THE_WAY, INTO, OR_LEAVE, ROW, render
from onefold.stores.mysql.statements.literals import Many, Name, as_read, batches_due, filled, in_one, many, read_well
from onefold.stores.mysql.statements.renewal import at_once, extend_all
from onefold.stores.sql.dialect import ROUNDS_MAX, Dialect, Reply, SqlFlow, SqlRequest, contended
from onefold.stores.sql.records import (
    AT,
    OURS,
    TABLE,
    WRITTEN,
    Parameters,
    of_address,
    of_claim,
    of_ending,
    of_entry,
    of_released,
    record,
    records,
)
from onefold.stores.sql.statements import ENDED, assigned, settled

if TYPE_CHECKING:
    from onefold.stores.samples.table import TableSampler
    from onefold.stores.sql.connection import Database
    from onefold.stores.sql.foreign_tables import Catalog
    from onefold.stores.sql.own_column import Rows
    from onefold.transactions import RecordColumn

# Ordered for people: who and what on the left, bytes on the right. Times are seconds since 1970. Binary columns compare
# bytes: `Key`, `KEY` and `key ` are three keys. A large maximum length costs nothing.
_RECORDS: Final = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    scope VARBINARY({SCOPE_MAX}) NOT NULL,
    operation VARBINARY({OPERATION_MAX}) NOT NULL,
    `key` VARBINARY({KEY_MAX}) NOT NULL,
    state VARBINARY(16) NOT NULL,
    attempt INT NOT NULL,
    began DOUBLE NOT NULL,
    changed DOUBLE NOT NULL,
    lease_until DOUBLE NOT NULL,
    expires DOUBLE,
    bypasses INT NOT NULL,
    remark LONGBLOB NOT NULL,
    revision INT NOT NULL,
    token VARBINARY(64) NOT NULL,
    fingerprint VARBINARY(128),
    notes LONGBLOB,
    omitted TINYINT NOT NULL,
    result LONGBLOB,
    PRIMARY KEY (scope, operation, `key`),
    KEY {TABLE}_expires (expires)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=binary
"""

# One row. Clusters require a primary key in every table.
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS onefold_schema (
    one TINYINT NOT NULL PRIMARY KEY,
    version INT NOT NULL,
    usable_from INT NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=binary
"""

# Taken while the tables are created. The name is server-wide, not per database: others wait some milliseconds.
LOCK: Final = "SELECT GET_LOCK('onefold_schema', 30)"
UNLOCK: Final = "SELECT RELEASE_LOCK('onefold_schema')"


class Mysql(Dialect):
    """MySQL 8, and any server that claims to be one. A new record costs one statement, a duplicate two."""

    name = "MySQL"
    form = "mysql"

    versions = (
        (
            _RECORDS,
            _SCHEMA,
            "INSERT INTO onefold_schema (one, version, usable_from) VALUES (1, 1, 1) ON DUPLICATE KEY UPDATE one = one",
        ),
        # On other databases version 2 added a partial index, which MySQL does not have.
        ("UPDATE onefold_schema SET version = 2 WHERE version < 2",),
    )

    count_tables = (
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() "
        f"AND table_name IN ('{TABLE}', 'onefold_schema')"
    )

    # In a caller's transaction a plain read may show an old snapshot. The lock is a shared one, which the refused
    # INSERT holds already: two concurrent duplicates that both wanted more would deadlock.
    locking = "LOCK IN SHARE MODE"

    # As three ranges, so that the server seeks in the primary key: with a row comparison it would scan from the start.
    after = (
        "(scope > :after_scope OR (scope = :after_scope AND operation > :after_operation) "
        "OR (scope = :after_scope AND operation = :after_operation AND key > :after_key))"
    )

    insert = f"{INTO} {ROW}"

    # An expired record makes an INSERT fail.
    seize = render(f"UPDATE {TABLE} SET {assigned(WRITTEN)} WHERE {AT} AND expires <= :now")

    # Statements about many records at once.
    read_many = Many(f"SELECT {ADDRESSED} FROM", f"{IN_THE_WAY} {locking}")
    look_many = Many(f"SELECT {ADDRESSED} FROM", IN_THE_WAY)
    settle_many = Many("UPDATE", render(f"SET {assigned(settled(ENDED))} WHERE {OURS}"))
    forget_many = Many(f"DELETE {TABLE} FROM", render(f"WHERE {OURS}"))

    # Rows that another transaction has locked are left for the next purge. The table of a DELETE cannot be read in it,
    # but a materialized copy of some rows can, and LIMIT makes one.
    remove_expired = render(
        f"DELETE {TABLE} FROM (SELECT scope AS dead_scope, operation AS dead_operation, key AS dead_key FROM {TABLE} "
        "WHERE expires <= :now ORDER BY expires LIMIT :limit FOR UPDATE SKIP LOCKED) AS dead "
        f"STRAIGHT_JOIN {TABLE} WHERE scope = dead_scope AND operation = dead_operation AND key = dead_key"
    )

    @classmethod
    def in_dialect(cls, statement: str) -> str:
        return render(statement)

    @classmethod
    def upserting(cls, rows: str) -> str:
        """Return the statement that writes these rows, and leaves live records as they are."""
        return f"{INTO} {rows} {OR_LEAVE}"

    def impatient_purge(self, limit: int, path: str | None = None) -> SqlFlow[int]:
        del path
        # In seconds, and at least one. The first is for the table, for which a pending ALTER TABLE lets others wait.
        yield SqlRequest("SET SESSION lock_wait_timeout = 1, innodb_lock_wait_timeout = 1", {})
        return (yield from self.background_purge(limit))

    def facts(self, database: Database) -> SqlFlow[dict[str, Any]]:
        from onefold.stores.mysql.facts import facts

        return facts(database)

    def sampler(self) -> TableSampler:
        from onefold.stores.samples.mysql_table import MysqlSampler

        return MysqlSampler(self)

    @property
    def foreign(self) -> Catalog:
        from onefold.stores.mysql.table_reader import MysqlCatalog

        return MysqlCatalog()

    def rows_of(self, column: RecordColumn) -> Rows:
        from onefold.stores.mysql.own_column import MysqlRows

        return MysqlRows(column, self)

    def lacks_savepoint(self, error: BaseException) -> bool:
        return number_of(error) == NO_SAVEPOINT

    def says_gone(self, error: BaseException) -> bool:
        return self.lacks_savepoint(error)

    def claim(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        return read_well(self._write(entry) if replacing is None else self._replace(entry, replacing))

    def _write(self, entry: Entry) -> SqlFlow[Record | Gone | None]:
        return self._insert(entry, self.insert, self.seize, of_entry(entry))

    def _insert(self, entry: Entry, insert: str, seize: str, values: Parameters) -> SqlFlow[Record | Gone | None]:
        for _ in range(ROUNDS_MAX):
            inserted: Reply = yield SqlRequest(insert, values)
            if inserted.written == 1:
                return None
            found = yield from self._in_the_way(entry.address)
            if found is not None:
                return None if entry.is_own(found.token) else found
            seized: Reply = yield SqlRequest(seize, values)
            if seized.written == 1:
                return None
        raise contended(entry.address)

    def claim_all(self, entries: Sequence[Entry]) -> SqlFlow[list[Record | Gone | None]]:
        return read_well(super().claim_all(entries))

    def insert_all(self, entries: Sequence[Entry]) -> SqlRequest:
        """Return a statement with as many entries as fit; the rest go into the next one."""
        rows = next(batches_due(filled(SqlRequest(ROW, of_entry(entry))) for entry in entries))
        return SqlRequest(self.upserting(", ".join(rows)), {}, rows=self.insert_returns)

    def read_all(self, addresses: Sequence[Address]) -> SqlRequest:
        return many(self.read_many, [of_address(address) for address in addresses], back=True)[0]

    def release(self, claim: Claim, released: Released | None = None) -> SqlFlow[bool]:
        return read_well(super().release(claim, released))

    def read(self, address: Address) -> SqlFlow[Record | None]:
        return read_well(super().read(address))

    def browse(self, query: Query, limit: int) -> SqlFlow[list[Record]]:
        return read_well(super().browse(query, limit))

    def extend_all(self, claims: Sequence[Claim], shortest: float = math.inf) -> SqlFlow[list[bool | None]]:
        return extend_all(self, claims, shortest)

    def at_once(self, request: SqlRequest, claim: Claim) -> SqlFlow[Reply]:
        return at_once(self, request, claim)

    def waiting(self, request: SqlRequest, seconds: int) -> SqlFlow[Reply]:
        """Send a request with a limit on its wait for row locks. The session is the store's own, and is restored."""
        yield SqlRequest(f"SET SESSION innodb_lock_wait_timeout = {seconds}", {})
        usual = SqlRequest("SET SESSION innodb_lock_wait_timeout = DEFAULT", {})
        try:
            reply: Reply = yield request
        except Exception:
            # Not `finally`: after an interrupt the flow is closed, and the connection is not used again.
            yield usual
            raise
        yield usual
        return reply

    def close_all(self, closes: Sequence[Close]) -> SqlFlow[list[bool]]:
        ours = sorted(closes, key=lambda close: close.claim.address.parts)
        requests = many(self.settle_many, [_settled(close.claim, close.by) for close in ours if close.by is not None])
        requests += many(self.forget_many, [of_claim(close.claim) for close in ours if close.by is None])
        found = yield from self._sent(requests, [close.claim for close in closes])
        if found is None:
            return [True] * len(closes)
        return [_is_closed(found, close) for close in closes]

    def _sent(self, requests: list[SqlRequest], claims: Sequence[Claim]) -> SqlFlow[dict[Address, Record] | None]:
        """Send requests; return None if all rows were written, else the records that exist now, read once more."""
        if not requests:
            return None
        replies: list[Reply] = yield requests
        if sum(reply.written for reply in replies) == len(claims):
            return None
        found: dict[Address, Record] = {}
        for request in many(self.read_many, [of_address(claim.address) for claim in claims], back=True):
            reply: Reply = yield request
            found |= {one.address: one for one in records(map(as_read, reply.rows))}
        return found


class MariaDb(Mysql):
    """MariaDB: a claim's write returns the record that exists afterwards. A duplicate costs one statement."""

    name = "MariaDB"
    insert_returns = True

    upsert_returning = f"{Mysql.upserting(ROW)} RETURNING {render(Mysql.selected())}"

    # A claim that marks its transaction, and a finish that checks the mark: one message each.
    insert_marked = in_one(Mysql.insert, "SAVEPOINT :mark")
    seize_marked = in_one(Mysql.seize, "SAVEPOINT :mark")
    end_marked = in_one("RELEASE SAVEPOINT :mark", Mysql.end_joined)

    @classmethod
    def upserting(cls, rows: str) -> str:
        # The last column is for drivers that do not report whether a transaction is open.
        return f"{super().upserting(rows)} RETURNING {ADDRESSED}, @@in_transaction"

    def waiting(self, request: SqlRequest, seconds: int) -> SqlFlow[Reply]:
        statement = f"SET STATEMENT innodb_lock_wait_timeout = {seconds} FOR {request.statement}"
        reply: Reply = yield replace(request, statement=statement)
        return reply

    def _write(self, entry: Entry) -> SqlFlow[Record | Gone | None]:
        reply: Reply = yield SqlRequest(self.upsert_returning, of_entry(entry), rows=True)
        found = record(entry.address, reply.rows[0])
        return None if entry.is_own(found.token) else found

    def claim_joined(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        # Here nearly every record is new, and a duplicate holds the record's lock until the transaction ends: MySQL's
        # way is cheaper for a new record, and gives a duplicate a shared lock.
        return super().claim(entry, replacing) if replacing is not None else read_well(super()._write(entry))

    def claim_marked(self, entry: Entry, replacing: Record | None = None) -> SqlFlow[Record | Gone | None]:
        if replacing is not None:
            return super().claim_marked(entry, replacing)
        values = of_entry(entry) | {"mark": Name(self.mark_of(Claim(entry.address, entry.token)))}
        return read_well(self._insert(entry, self.insert_marked, self.seize_marked, values))

    def finish_marked(self, claim: Claim, ending: Ending) -> SqlFlow[bool]:
        # The mark is checked first: a handler may have left the connection in autocommit mode.
        values = of_claim(claim) | of_ending(ending) | {"mark": Name(self.mark_of(claim))}
        try:
            reply: Reply = yield SqlRequest(self.end_marked, values)
        except Exception as error:
            if not self.lacks_savepoint(error):
                raise
            return False
        return reply.written == 1

    def checking(self, claim: Claim) -> str:
        return f"RELEASE SAVEPOINT {self.mark_of(claim)}"


MYSQL: Final = Mysql()
MARIADB: Final = MariaDb()

# The first version with SKIP LOCKED; RETURNING is a little older.
MARIADB_MIN: Final = (10, 6)

_MARIADB: Final = re.compile(r"(\d+)\.(\d+)\.\d+-MariaDB")


def dialect_of(server_version: str) -> Mysql:
    """Return the dialect for the version in the server's greeting: `5.5.5-10.11.6-MariaDB-log`, `8.0.36`.

    A proxy may hide a MariaDB behind another name; MySQL's way works there, too.
    """
    found = _MARIADB.search(server_version)
    if found is not None and (int(found[1]), int(found[2])) >= MARIADB_MIN:
        return MARIADB
    return MYSQL


def _settled(claim: Claim, by: Ending | Released) -> Parameters:
    if isinstance(by, Ending):
        return of_claim(claim) | of_ending(by) | {"attempt": None}
    unchanged = {"result": None, "omitted": None}
    return of_claim(claim) | of_released(by) | {"state": State.OPEN.value} | unchanged


def _is_ours(found: dict[Address, Record], claim: Claim, *states: State) -> bool:
    one = found.get(claim.address)
    return one is not None and one.token == claim.token and one.state in states


def _is_closed(found: dict[Address, Record], close: Close) -> bool:
    if isinstance(close.by, Ending):
        return _is_ours(found, close.claim, *State)
    # A missing record counts as released.
    return close.claim.address not in found or _is_ours(found, close.claim, *State)
