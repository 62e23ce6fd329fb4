"""`python -m bench.scale.partitions`: purge by dropping a partition, against deleting its records in batches.

Two tables of one PostgreSQL, each in a schema of its own, have the same expired records: one is purged as `onefold
purge` does, in batches; the other is a sealed partition, which is dropped. A worker delivers new keys meanwhile. Then
what a delivery costs beside more and more sealed partitions: the two tables take turns, so that the ratio can be
believed where the times cannot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

from bench.purge import LOAD
from onefold import Guard
from onefold.maintenance.purge import purge
from services.house import House
from services.postgres import connected

ROWS: Final = 10_000_000
QUICK_ROWS: Final = 200_000

# Each has a few thousand records, as in a quick look; a probe of its index costs the same in a larger one, if cached.
SEALED: Final = (0, 1, 3, 7, 14, 30)
RECORDS_EACH: Final = 2_000
DELIVERIES: Final = 300
ROUNDS: Final = 7


# All have expired, a day ago and earlier.
_LOAD: Final = LOAD.replace("30 * 86400", "86400").replace("- 2 * 86400", "- 3 * 86400")

# The current partition, as old as one that is due.
OLD: Final = (
    "DROP TRIGGER onefold_partitions ON onefold_records; CREATE TRIGGER onefold_partitions BEFORE INSERT ON "
    "onefold_records FOR EACH ROW EXECUTE FUNCTION onefold_records_once('1', '1')"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scale.partitions", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="expired records (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} records")
    asked = parser.parse_args(arguments)
    with closing(House()) as house, house.own("postgres") as server:
        urls = {name: _schema(server.url, name) for name in ("plain", "split")}
        found = {
            "deliveries": _deliveries(urls["plain"], f"{urls['split']}&partitions=day"),
            "purge": _purges(server.url, QUICK_ROWS if asked.quick else asked.rows),
        }
    print(json.dumps(found, indent=2))
    return 0


def _schema(url: str, name: str) -> str:
    with connected(url) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{url}?options=-csearch_path%3D{name}"


def _purges(url: str, rows: int) -> dict[str, Any]:
    plain, split = (_schema(url, name) for name in ("deleted", "dropped"))
    return {
        "records": rows,
        "delete": _purge(plain, plain, rows, is_sealed=False),
        "drop": _purge(split, f"{split}&partitions=day", rows, is_sealed=True),
    }


def _purge(url: str, store: str, rows: int, *, is_sealed: bool) -> dict[str, Any]:
    with closing(Guard(f"{store}&purge=no")) as guard:
        guard.store.purge(1)
        with connected(url) as connection:
            connection.execute(_LOAD.format(rows=rows))
            connection.execute("VACUUM ANALYZE onefold_records")
            if is_sealed:
                connection.execute(OLD)
                # Sealed now, while nothing of it may be dropped.
                connection.execute(
                    "UPDATE onefold_records SET expires = NULL, due = NULL WHERE key IN "
                    "(SELECT key FROM onefold_records LIMIT 2000)"
                )
                guard.store.purge(1)
                connection.execute("UPDATE onefold_records SET expires = 1, due = 0 WHERE due IS NULL")
                connection.execute("VACUUM ANALYZE onefold_records")
            before = _bytes(connection)
            took, ended = list[float](), threading.Event()
            worker = threading.Thread(target=_work, args=(store, took, ended))
            worker.start()
            while not took:
                ended.wait(0.001)
            wal = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0]
            done = purge(guard.store)
            written = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [wal]).fetchone()[0]
            ended.set()
            worker.join()
            return {
                "removed": done.removed,
                "seconds": round(done.seconds, 3),
                "wal_megabytes": round(float(written) / 1e6, 1),
                "megabytes_before": round(before / 1e6),
                "megabytes_after": round(_bytes(connection) / 1e6),
                "longest_delivery_ms": round(max(took) * 1e3, 1),
            }


def _bytes(connection: Any) -> int:
    found = (
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND relname ~ '^onefold_records' "
    )
    return int(connection.execute(f"{found} AND relnamespace = current_schema()::regnamespace").fetchone()[0])


def _work(store: str, took: list[float], ended: threading.Event) -> None:
    with closing(Guard(f"{store}&purge=no")) as guard:
        number = 0
        while not ended.is_set():
            began = time.monotonic()
            guard.run("beside", str(number), _nothing)
            took.append(time.monotonic() - began)
            number += 1


def _nothing() -> None:
    pass


def _deliveries(plain: str, split: str) -> list[dict[str, Any]]:
    """How many times longer a delivery takes beside so many sealed partitions: the median of rounds."""
    found, sealed = list[dict[str, Any]](), 0
    with closing(Guard(f"{plain}&purge=no")) as one, closing(Guard(f"{split}&purge=no")) as many:
        many.store.purge(1)
        for wanted in SEALED:
            while sealed < wanted:
                names = [f"{sealed}-{number}" for number in range(RECORDS_EACH)]
                many.run_batch("filled", names, key=str, handler=lambda _: None)
                one.run_batch("filled", names, key=str, handler=lambda _: None)
                with connected(split.replace("&partitions=day", "")) as connection:
                    connection.execute(OLD)
                many.store.purge(1)
                sealed += 1
            new, again = list[float](), list[float]()
            for _ in range(ROUNDS):
                (first, second), (third, fourth) = _timed(one), _timed(many)
                new.append(third / first)
                again.append(fourth / second)
            found.append(
                {
                    "sealed": wanted,
                    "new": round(statistics.median(new), 2),
                    "duplicate": round(statistics.median(again), 2),
                }
            )
    return found


_turn = iter(range(1_000_000))


def _timed(guard: Guard) -> tuple[float, float]:
    keys = [f"d{next(_turn)}" for _ in range(DELIVERIES)]
    times = []
    for _ in range(2):
        began = time.monotonic()
        for key in keys:
            guard.run("delivered", key, _nothing)
        times.append(time.monotonic() - began)
    return times[0], times[1]


if __name__ == "__main__":
    sys.exit(main())
