"""Fill a store with records as deliveries have left them, at the speed of a bulk load.

One real delivery writes a record; each other one is a copy of it with a key, a token and times of its own. So the
format is the store's, whatever it becomes. Keys are computed from their number, by the server or here: any of ten
million can be delivered again, and none has to be remembered.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from onefold import Guard
from services import postgres, redis
from services.house import House, whole
from services.processes import descendants
from services.servers import Server

OPERATION: Final = "charge"
TEMPLATE: Final = "00000000-0000-4000-8000-000000000000"
KEEP: Final = "30d"

# The records were written in the course of a day: purges find them by when they expire.
DAY_SECONDS: Final = 86_400

# Random keys leave a B-tree about so full; one that is built of sorted keys would be fuller than any that grew.
GROWN_PERCENT: Final = 70

# Between two reports of progress, and in one message to Redis.
CHUNK: Final = 50_000

UUID_BYTES: Final = 16

# A server for ten million records has memory for them; the tests' own has 32 MB.
POSTGRES_SETTINGS: Final = {"shared_buffers": "1GB", "max_wal_size": "4GB"}

Told = Callable[[int], object]


class Sizes(NamedTuple):
    """What the records take: all of it, and the part of it that finds a key."""

    bytes: int
    index_bytes: int | None


class Place(Protocol):
    """An empty database, file or keyspace of one store."""

    url: str

    def fill(self, begin: int, end: int, told: Told) -> None:
        """Add the records with these numbers."""

    def sizes(self) -> Sizes: ...

    def log_bytes(self) -> int | None:
        """Return how much the store has written to its log so far, if it can say."""

    def reads(self) -> int:
        """Return how often records were looked for so far."""


class Places(NamedTuple):
    """One store, of this process alone, and how to get an empty place in it."""

    name: str
    version: str
    new: Callable[[], Place]
    # The processor time that the server has taken so far, if there is one.
    cpu_seconds: Callable[[], float | None] = lambda: None


def key_of(number: int) -> str:
    """Return the key of one record: as long and as random as a UUID."""
    digits = hashlib.md5(b"%d" % number, usedforsecurity=False).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def write_template(url: str, payload: object = None) -> None:
    """Deliver once, for real."""
    with Guard(url) as guard:
        guard.run(OPERATION, TEMPLATE, lambda: None, payload=payload, keep=KEEP)


class PostgresPlace:
    def __init__(self, server: Any) -> None:
        self._database = postgres.Database(server)
        self.url = self._database.url + "?purge=no"
        self._plain_url = self._database.url

    def fill(self, begin: int, end: int, told: Told) -> None:
        with postgres.connected(self._plain_url) as connection:
            connection.execute("SET maintenance_work_mem = '512MB'; SET synchronous_commit = off")
            names = [row[0] for row in connection.execute(f"{_COLUMNS} ORDER BY ordinal_position").fetchall()]
            indexes = connection.execute(_INDEXES).fetchall()
            connection.execute("ALTER TABLE onefold_records DROP CONSTRAINT onefold_records_pkey")
            for name, _ in indexes:
                connection.execute(f"DROP INDEX {name}")
            written = [_WRITTEN.get(name, f"template.{name}") for name in names]
            # The words are columns of our own table.
            insert = f"INSERT INTO onefold_records ({', '.join(names)}) SELECT {', '.join(written)} FROM {_NUMBERS}"
            for first in range(begin, end, CHUNK * 10):
                last = min(first + CHUNK * 10, end)
                connection.execute(insert, {"first": first, "last": last - 1, "end": end, "template": TEMPLATE})
                told(last - begin)
            connection.execute(_PRIMARY_KEY)
            connection.execute("ALTER INDEX onefold_records_pkey RESET (fillfactor)")
            for _, definition in indexes:
                connection.execute(definition)
            connection.execute("VACUUM ANALYZE onefold_records")
            connection.execute("CHECKPOINT")

    def sizes(self) -> Sizes:
        with postgres.connected(self._plain_url) as connection:
            connection.execute("VACUUM onefold_records")
            asked = "SELECT pg_total_relation_size('onefold_records'), pg_indexes_size('onefold_records')"
            return Sizes(*connection.execute(asked).fetchone())

    def log_bytes(self) -> int | None:
        with postgres.connected(self._plain_url) as connection:
            return int(connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()[0])

    def reads(self) -> int:
        with postgres.connected(self._plain_url) as connection:
            asked = "SELECT sum(idx_scan) + sum(seq_scan) FROM pg_stat_user_tables WHERE relname = 'onefold_records'"
            return int(connection.execute(asked).fetchone()[0] or 0)


_COLUMNS: Final = (
    "SELECT column_name FROM information_schema.columns "
    "WHERE table_name = 'onefold_records' AND table_schema = current_schema()"
)
_INDEXES: Final = (
    "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index "
    "WHERE indrelid = 'onefold_records'::regclass AND NOT indisprimary"
)
_PRIMARY_KEY: Final = (
    "ALTER TABLE onefold_records ADD CONSTRAINT onefold_records_pkey "
    f"PRIMARY KEY (scope, operation, key) WITH (fillfactor = {GROWN_PERCENT})"
)
_AGE: Final = f"{DAY_SECONDS} * (1 - number::float8 / %(end)s)"
_WRITTEN: Final = {
    "key": "md5(number::text)::uuid::text",
    "token": "uuid_send(gen_random_uuid())",
    "began": f"template.began - {_AGE}",
    "changed": f"template.changed - {_AGE}",
    "expires": f"template.expires - {_AGE}",
    "due": f"floor((template.expires - {_AGE}) / 600)::integer",
}
_NUMBERS: Final = (
    "generate_series(%(first)s::integer, %(last)s::integer) AS number, "
    "(SELECT * FROM onefold_records WHERE key = %(template)s) AS template"
)


@contextmanager
def postgres_places(house: House) -> Iterator[Places]:
    server = whole(house.home, lambda home: postgres.start_postgres(home, **POSTGRES_SETTINGS))
    try:
        yield Places("postgres", f"PostgreSQL {server.version}", lambda: PostgresPlace(server), _cpu_seconds(server))
    finally:
        server.end()


class RedisPlace:
    def __init__(self, url: str) -> None:
        self.url = url
        self._template = b""

    def fill(self, begin: int, end: int, told: Told) -> None:
        with closing(redis.named_client(self.url)) as client:
            if not self._template:
                (self._template,) = client.scan_iter("*", count=1_000)
            record, ttl = client.get(self._template), client.pttl(self._template)
            # A UUID is stored as its number, after a mark.
            own = self._template[:-UUID_BYTES]
            # Redis moves its hash tables a little at each tick: the sizes are to be those of when it is done.
            client.config_set("hz", 500)
            with closing(_Pipe(self.url)) as pipe:
                for first in range(begin, end, CHUNK):
                    last = min(first + CHUNK, end)
                    pipe.send(b"".join(_sets(own, record, ttl, first, last)), last - first)
                    told(last - begin)
            _settle(client)
            client.config_set("hz", 10)

    def sizes(self) -> Sizes:
        with closing(redis.named_client(self.url)) as client:
            number = urlsplit(self.url).path.removeprefix("/")
            tables = client.memory_stats().get(f"db.{number}", {})
            index = sum(size for name, size in tables.items() if name.startswith("overhead.hashtable"))
            return Sizes(int(client.info("memory")["used_memory"]), int(index))

    def log_bytes(self) -> int | None:
        return None

    def reads(self) -> int:
        with closing(redis.named_client(self.url)) as client:
            calls = client.info("commandstats")
        return sum(calls.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "fcall"))


def _sets(own: bytes, record: bytes, ttl: int, first: int, last: int) -> Iterator[bytes]:
    """Encode a SET for each number: as the store's scripts send it, with a token of its own."""
    contents, size, milliseconds = record[16:], len(record), b"%d" % ttl
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b" % (len(own) + 16, own)
    tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(milliseconds), milliseconds)
    for number in range(first, last):
        digest = hashlib.md5(b"%d" % number, usedforsecurity=False).digest()
        yield b"%b%b\r\n$%d\r\n%b%b%b" % (head, digest, size, digest[::-1], contents, tail)


class _Pipe:
    """A bare connection: redis-py would take minutes to pack ten million commands."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port or 6379), redis.SOCKET_SECONDS)
        self.send(b"*2\r\n$6\r\nSELECT\r\n$1\r\n%b\r\n" % parts.path.removeprefix("/").encode(), 1)

    def send(self, commands: bytes, replies: int) -> None:
        self._socket.sendall(commands)
        expected, received = b"+OK\r\n" * replies, bytearray()
        while len(received) < len(expected):
            part = self._socket.recv(1 << 20)
            if not part:
                raise AssertionError("Redis closed the connection")
            received += part
        if received != expected:
            raise AssertionError(f"Redis refused a record: {bytes(received[:200])!r}")

    def close(self) -> None:
        self._socket.close()


# So often in a row the memory has to be the same, a tick apart each; and no longer than that.
_SAME_TIMES: Final = 10
_SETTLE_SECONDS_MAX: Final = 120.0


def _settle(client: Any) -> None:
    """Wait until no hash table is moving any more."""
    ends, before, same = time.monotonic() + _SETTLE_SECONDS_MAX, -1, 0
    while same < _SAME_TIMES and time.monotonic() < ends:
        time.sleep(0.1)
        now = sum(size for name, size in client.memory_stats().items() if name == "overhead.total")
        same, before = (same + 1, before) if now == before else (0, now)


@contextmanager
def redis_places(house: House) -> Iterator[Places]:
    server = whole(house.home, redis.start_redis)
    numbers = iter(range(16))
    try:
        place = urlsplit(server.url)
        yield Places(
            "redis",
            f"Redis {server.version}",
            lambda: RedisPlace(place._replace(path=f"/{next(numbers)}").geturl()),
            _cpu_seconds(server),
        )
    finally:
        server.end()


class SqlitePlace:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = f"sqlite:///{path}?purge=no"

    def fill(self, begin: int, end: int, told: Told) -> None:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            # Nobody needs it after a crash: no journal, and the index in memory.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA cache_size = -1000000")
            found = connection.execute("SELECT * FROM onefold_records WHERE key = ?", (TEMPLATE,))
            names = [column[0] for column in found.description]
            template = dict(zip(names, found.fetchone(), strict=True))
            insert = f"INSERT INTO onefold_records VALUES ({', '.join(f':{name}' for name in names)})"
            for first in range(begin, end, CHUNK):
                last = min(first + CHUNK, end)
                connection.execute("BEGIN")
                connection.executemany(insert, (_row(template, number, end) for number in range(first, last)))
                connection.execute("COMMIT")
                told(last - begin)

    def sizes(self) -> Sizes:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            index: int | None = None
            try:
                asked = "SELECT sum(pgsize) FROM dbstat WHERE aggregate = TRUE AND name LIKE '%onefold_records_%'"
                index = int(connection.execute(asked).fetchone()[0])
            except sqlite3.OperationalError:
                pass  # This SQLite was built without it.
            return Sizes(self._path.stat().st_size, index)

    def log_bytes(self) -> int | None:
        return None

    def reads(self) -> int:
        # The file does not count. `waiters` counts the statements of each process instead.
        return 0


def _row(template: dict[str, Any], number: int, end: int) -> dict[str, Any]:
    age = DAY_SECONDS * (1 - number / end)
    times = {name: template[name] - age for name in ("began", "changed", "lease_until", "expires")}
    token = hashlib.md5(b"token %d" % number, usedforsecurity=False).digest()
    return template | times | {"key": key_of(number), "token": token}


@contextmanager
def sqlite_places(house: House) -> Iterator[Places]:
    numbers = iter(range(100))
    folder = house.home.room("sqlite")
    yield Places(
        "sqlite", f"SQLite {sqlite3.sqlite_version}", lambda: SqlitePlace(folder / f"onefold-{next(numbers)}.db")
    )


def _cpu_seconds(server: Server) -> Callable[[], float | None]:
    """Return what tells the processor time of a server: of its processes, and of those that have ended below them."""

    def taken() -> float | None:
        try:
            return sum(
                _cpu_ticks(pid) for daemon in server.daemons for pid in (daemon.pid, *descendants(daemon.pid))
            ) / (os.sysconf("SC_CLK_TCK"))
        except OSError:
            return None  # Only Linux tells, in /proc; or one of them has just ended.

    return taken


def _cpu_ticks(pid: int) -> int:
    # After the name, which may hold anything: the time in the program and in the kernel, and both of ended children.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


STORES: Final = {"postgres": postgres_places, "redis": redis_places, "sqlite": sqlite_places}
