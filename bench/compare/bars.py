"""The bars: what has to be reached, and whether a run reached it. Pure: from the results alone.

A ratio says how many times longer Onefold takes; below one, Onefold is the faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from bench.compare.contests import FLOOR, LIMIT, MANY, PEER

Results = dict[str, Any]

MET: Final = "met"
MISSED: Final = "missed"
NOT_MEASURED: Final = "not measured"

# Of a claim among ten million records, against one among ten thousand.
GROWTH_AT_MOST: Final = 1.5
FEW_RECORDS: Final = 10_000
MANY_RECORDS: Final = 10_000_000


class Reading(NamedTuple):
    """What a run says about a bar: the figure that decides, in words what it is, and who decided it."""

    value: float
    unit: str = "×"
    of: str = ""


class Bar(NamedTuple):
    work: str
    must: str
    at_most: float
    read: Callable[[Results], Reading | None]
    # What our statements take without Onefold, in the same unit.
    floor: Callable[[Results], Reading | None] | None = None

    def judge(self, results: Results) -> dict[str, Any]:
        found = self.read(results)
        if found is None:
            return {"work": self.work, "must": self.must, "verdict": NOT_MEASURED}
        floor = self.floor and self.floor(results)
        return {
            "work": self.work,
            "must": self.must,
            "found": round(found.value, 3),
            "unit": found.unit,
            "of": found.of,
            **({"floor": round(floor.value, 3)} if floor else {}),
            "verdict": MET if found.value <= self.at_most else MISSED,
            "by": by_how_much(found.value, self.at_most),
        }


def by_how_much(value: float, at_most: float) -> str:
    """Say how far a figure is from its bar, in percent of the bar."""
    percent = round(abs(value / at_most - 1) * 100)
    if percent == 0:
        return "just"
    return f"{percent} % {'under' if value <= at_most else 'over'}"


def judge(results: Results) -> list[dict[str, Any]]:
    return [bar.judge(results) for bar in BARS]


def contest_of(results: Results, name: str) -> dict[str, Any] | None:
    return next((one for one in results["contests"] if one["name"] == name), None)


def side_of(results: Results, contest: str, side: str) -> dict[str, Any] | None:
    """Return a side by its name, or by its role where only one has it."""
    found = contest_of(results, contest) or {"sides": []}
    return next((one for one in found["sides"] if side in (one["name"], one["role"])), None)


def against(contest: str, call: str, side: str = LIMIT) -> Callable[[Results], Reading | None]:
    """Read how many times longer ours takes than this side."""

    def read(results: Results) -> Reading | None:
        found = side_of(results, contest, side)
        return Reading(found[call]["ratio"][1], "×", found["name"]) if found else None

    return read


def other_way(contest: str, call: str, side: str) -> Callable[[Results], Reading | None]:
    """Read how many times longer another way of ours, or its statements alone, takes than the limit."""

    def read(results: Results) -> Reading | None:
        way, limit = side_of(results, contest, side), side_of(results, contest, LIMIT)
        if way is None or limit is None:
            return None
        return Reading(limit[call]["ratio"][1] / way[call]["ratio"][1], "×", limit["name"])

    return read


def slowest_win(contest: str, call: str, role: str = PEER) -> Callable[[Results], Reading | None]:
    """Read the ratio to the fastest peer: ahead of that one is ahead of all."""

    def read(results: Results) -> Reading | None:
        found = contest_of(results, contest) or {"sides": []}
        ratios = [(one[call]["ratio"][1], one["name"]) for one in found["sides"] if one["role"] == role]
        return Reading(max(ratios)[0], "×", max(ratios)[1]) if ratios else None

    return read


def with_callers(contest: str, callers: int, side: str) -> Callable[[Results], Reading | None]:
    """Read how many times longer a delivery of ours takes with so many callers at once."""

    def read(results: Results) -> Reading | None:
        found = contest_of(results, contest) or {"throughput": []}
        for course in found["throughput"]:
            for one in course["sides"]:
                if course["callers"] == callers and side in (one["name"], one["role"]) and one.get("ratio"):
                    return Reading(one["ratio"][1], "×", one["name"])
        return None

    return read


def size_of(store: str) -> Callable[[Results], Reading | None]:
    def read(results: Results) -> Reading | None:
        sizes = [one for one in results["sizes"] if (one["store"], one["keys"]) == (store, "text")]
        found = next((one for one in sizes if "bytes" in one), None)
        return Reading(found["bytes"], " bytes") if found else None

    return read


def growth(results: Results) -> Reading | None:
    """Read the store that grew worst from ten thousand to ten million records, as `make bench-scale` found it.

    A store that was measured in turn with a small one has its ratio; the others are compared with their own past.
    """
    rows = results.get("growth") or ()
    few = {one["store"]: one["claim_us"] for one in rows if one["records"] == FEW_RECORDS}
    ratios = [
        (one["ratio"] if "ratio" in one else one["claim_us"] / few[one["store"]], one["store"])
        for one in rows
        if one["records"] == MANY_RECORDS and ("ratio" in one or one["store"] in few)
    ]
    return Reading(max(ratios)[0], "×", max(ratios)[1]) if ratios else None


def _at_most(work: str, contest: str, limits: Iterable[tuple[str, float]], than: str, side: str = LIMIT) -> list[Bar]:
    return [
        Bar(
            f"{work}, {call}",
            f"at most {most:g} × {than}",
            most,
            against(contest, call, side),
            other_way(contest, call, FLOOR),
        )
        for call, most in limits
    ]


def _ahead(work: str, contest: str, whom: str = "every peer", side: str | None = None) -> list[Bar]:
    calls = ("first", "duplicate")
    read = [against(contest, call, side) if side else slowest_win(contest, call) for call in calls]
    return [Bar(f"{work}, {call}", f"ahead of {whom}", 1.0, one) for call, one in zip(calls, read, strict=True)]


def _many(work: str, contest: str) -> list[Bar]:
    what = f"{work}, {MANY:,} tasks"
    return [
        Bar(what, "at most 1.3 × the raw async driver", 1.3, with_callers(contest, MANY, LIMIT)),
        Bar(what, "ahead of idemkit", 1.0, with_callers(contest, MANY, "idemkit")),
    ]


REDIS, JOINED, CLAIM, SQLITE = "Redis", "PostgreSQL, within", "PostgreSQL, claim mode", "SQLite, claim mode"
BATCH, HTTP, MEMORY = "PostgreSQL, joined batch of 100", "ASGI middleware on Redis", "Memory"

BARS: Final = (
    *_at_most(REDIS, "redis", [("first", 1.1)], "two raw commands"),
    *_at_most(REDIS, "redis", [("duplicate", 1.2)], "one raw command"),
    *_ahead(REDIS, "redis"),
    *_at_most(JOINED, "postgres-joined", [("first", 1.10), ("duplicate", 1.25)], "a hand-written dedup INSERT"),
    Bar(
        "PostgreSQL, transactional, first",
        "faster than the hand-written one",
        1.0,
        other_way("postgres-joined", "first", "transactional"),
    ),
    *_at_most(BATCH, "postgres-batch", [("first", 1.15)], "INSERT … unnest"),
    Bar(
        f"{BATCH}, first", "at least 8 × as fast as one by one", 1 / 8, against("postgres-batch", "first", "one by one")
    ),
    *_at_most(CLAIM, "postgres", [("first", 1.15)], "two raw statements"),
    *_at_most(CLAIM, "postgres", [("duplicate", 1.2)], "one raw statement"),
    *(
        Bar(f"{CLAIM}, {call}", "at least 2 × as fast as idemkit", 0.5, against("postgres", call, "idemkit"))
        for call in ("first", "duplicate")
    ),
    *_at_most(SQLITE, "sqlite", [("first", 1.3), ("duplicate", 2.0)], "the same statements by hand"),
    *_ahead(SQLITE, "sqlite-normal", "exactly-once at the same durability", "exactly-once"),
    *_at_most(MEMORY, "memory", [("first", 4.5), ("duplicate", 3.5)], "a bare set (BabelQueue's wrap)", "BabelQueue"),
    *_ahead(MEMORY, "memory", "every peer with claims"),
    *_at_most(HTTP, "http", [("first", 1.4), ("duplicate", 1.0)], "the bare app with a handler of 1 ms"),
    *_ahead(HTTP, "http"),
    *_many("Redis, async", "redis-async"),
    *_many("PostgreSQL, async", "postgres-async"),
    Bar(
        "Growth",
        f"a claim at 10 million records at most {GROWTH_AT_MOST:g} × one at 10 thousand",
        GROWTH_AT_MOST,
        growth,
    ),
    Bar("Redis, a finished record without result", "at most 230 bytes", 230, size_of("redis")),
    Bar("PostgreSQL, a finished record without result", "at most 270 bytes, after VACUUM", 270, size_of("postgres")),
)
