"""`make bench-scale`: what a delivery costs as a store grows, what waiting duplicates cost, and a purge beside load.

Fills PostgreSQL, Redis and SQLite to 10 thousand, 1 million and 10 million records, on servers of its own, and measures
at each size. All of it takes about half an hour and 8 GB of disk. Nothing is asserted: a machine that is busy with
something else is no failure. `--save` writes docs/benchmarks/: the numbers, the page and its pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from bench import purge
from bench.scale import growth, waiters
from bench.scale.filling import STORES, write_template
from bench.scale.page import page
from bench.scale.pictures import pictures
from onefold.maintenance.purge import BATCH
from services.house import House
from services.processes import ServerFailed
from services.programs import Missing

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PARTS: Final = ("growth", "waiters", "purge")

QUICK_RECORDS: Final = (10_000, 50_000)
QUICK_ROUNDS: Final = 50
QUICK_WAITERS: Final = (1, 8)
QUICK_HANDLER_SECONDS: Final = 0.5

# Enough for the bytes of one: they hardly depend on how many there are.
FINGERPRINT_RECORDS: Final = 1_000_000

PURGE_ROWS, QUICK_PURGE_ROWS = purge.ROWS, 20_000
PURGE_SECONDS, QUICK_PURGE_SECONDS = purge.SECONDS, 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _asked(arguments)
    load_before = os.getloadavg()[0]
    document: dict[str, Any] = {
        "note": asked.note,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {},
        "versions": [],
        "missing": [],
        "growth": [],
        "bytes": [],
        "waiters": [],
        "purge": None,
    }
    with closing(House()) as house:
        for store in asked.only or STORES:
            _measure(store, house, asked, document)
        if "purge" in asked.part and "postgres" in (asked.only or STORES):
            document["purge"] = _purged(house, quick=asked.quick)
    document["machine"] = _machine(load_before)
    if asked.save:
        save(document, FOLDER)
    print(json.dumps(document, indent=2) if asked.format == "json" else page(document))
    return 0


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--only", action="append", choices=[*STORES], metavar="STORE", help=", ".join(STORES))
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (default: all)")
    parser.add_argument("--records", action="append", type=int, help="a size to measure at; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see it work")
    parser.add_argument("--rounds", type=int, help="calls of each kind at each size")
    parser.add_argument("--format", choices=["page", "json"], default="page")
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks/")
    parser.add_argument("--note", default="", help="a sentence for the page, such as what else the machine did")
    asked = parser.parse_args(arguments)
    asked.part = asked.part or PARTS
    asked.records = tuple(asked.records or (QUICK_RECORDS if asked.quick else growth.RECORDS))
    if min(asked.records) < 1:
        parser.error("--records is a number above zero")
    asked.rounds = asked.rounds or (QUICK_ROUNDS if asked.quick else growth.ROUNDS)
    return asked


def _measure(store: str, house: House, asked: Any, document: dict[str, Any]) -> None:
    """Add what one store shows; one whose server is missing is named."""
    try:
        with STORES[store](house) as places:
            document["versions"].append(places.version)
            if "growth" in asked.part:
                for grown in growth.measure(places, asked.records, asked.rounds, _tell):
                    document["growth"].append(grown.as_json())
                records = min(FINGERPRINT_RECORDS, max(asked.records))
                found = growth.bytes_with_fingerprint(places, records, _tell)
                document["bytes"].append(
                    {"store": store, "form": "fingerprint", "records": records, "bytes": round(found, 1)}
                )
            if "waiters" in asked.part:
                document["waiters"] += _waited(store, places.new(), quick=asked.quick)
    except (Missing, ServerFailed) as error:
        document["missing"].append({"store": store, "why": str(error).splitlines()[0]})


def _waited(store: str, place: Any, *, quick: bool) -> list[dict[str, Any]]:
    write_template(place.url)
    numbers = QUICK_WAITERS if quick else waiters.WAITERS
    handler_seconds = QUICK_HANDLER_SECONDS if quick else waiters.HANDLER_SECONDS
    found = []
    for waited in waiters.measure(store, place, numbers, handler_seconds):
        _tell(f"{store}, waiters in {waited.where}", waited.waiters, max(numbers))
        found.append(waited.as_json())
    return found


def _purged(house: House, *, quick: bool) -> dict[str, Any]:
    rows, seconds = (QUICK_PURGE_ROWS, QUICK_PURGE_SECONDS) if quick else (PURGE_ROWS, PURGE_SECONDS)
    _tell("purge beside load", 0, rows // 2)
    with house.own("postgres") as server:
        return purge.as_json(purge.measure(server.url, rows, seconds, BATCH))


def _tell(what: str, done: int, total: int) -> None:
    """On the other stream: what is printed at the end can be piped."""
    end = "" if sys.stderr.isatty() and done < total else "\n"
    begin = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{begin}{time.strftime('%H:%M:%S')} {what}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


def _machine(load_before: float) -> dict[str, Any]:
    """Describe the machine in general terms."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processors": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }


def save(document: dict[str, Any], folder: Path) -> None:
    """Write the numbers, the page that is made of them, and its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "scale.md").write_text(page(document), encoding="utf-8")
    for name, drawn in pictures(document).items():
        (folder / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
