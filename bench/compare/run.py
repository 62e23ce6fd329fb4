"""Run one contest: open the sides, rehearse, measure in turn, and say who was missing and why."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from importlib import metadata
from typing import Any, Final, NamedTuple

from bench.compare.contests import OURS, Contest, Entrant
from bench.compare.spread import percentile, ratios
from bench.compare.throughput import Callers, Course, deliver_async, slice_seconds, warm_async
from bench.measure import Side, SideFailed, Taken, check, take_turns, take_turns_async
from services.house import House

# An exception's first words say enough in a table.
REASON_MAX: Final = 200


class Asked(NamedTuple):
    """How long a contest of weight 1 takes, at most how many rounds, and the share of the throughput's usual time."""

    seconds: float
    rounds: int | None = None
    throughput: float = 1.0


class Rivals(NamedTuple):
    """Who takes part, with their sides; and who does not, with the reason."""

    entrants: list[Entrant]
    sides: list[Side]
    missing: dict[str, str]

    @property
    def ours(self) -> int:
        return next(index for index, entrant in enumerate(self.entrants) if entrant.role == OURS)


class Without(Exception):
    """A side failed under way: once more, without it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.name, self.reason = name, reason


def run(contest: Contest, house: House, asked: Asked) -> dict[str, Any]:
    """Measure a contest; a side that cannot be opened, raises or runs a handler twice is named, and left out."""
    missing = {entrant.name: entrant.missing for entrant in contest.entrants if entrant.missing}
    # Each turn ends the loop, or has one side less.
    for _ in contest.entrants:
        try:
            if contest.is_async:
                return asyncio.run(_run_async(contest, house, asked, missing))
            return _run(contest, house, asked, missing)
        except Without as without:
            missing[without.name] = without.reason
    return _results(contest, Rivals([], [], missing), Taken([], []))


def _run(contest: Contest, house: House, asked: Asked, missing: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with _kept(contest, found), ExitStack() as stack:
        rivals = Rivals([], [], missing)
        for entrant in _present(contest, rivals):
            with _admitted(entrant, rivals):
                side = stack.enter_context(entrant.opener()(house))
                _rehearse(side)
                rivals.sides.append(side)
        if not _has_ours(rivals):
            found |= _results(contest, Rivals([], [], missing), Taken([], []))
            return found
        with _blamed(rivals):
            taken = take_turns(rivals.sides, **_how(contest, asked))
        found |= _results(contest, rivals, taken)
        if asked.throughput:
            found["throughput"] = _speeds(contest, rivals, asked)
    return found


async def _run_async(contest: Contest, house: House, asked: Asked, missing: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with _kept(contest, found):
        async with AsyncExitStack() as stack:
            rivals = Rivals([], [], missing)
            for entrant in _present(contest, rivals):
                with _admitted(entrant, rivals):
                    side = await stack.enter_async_context(entrant.opener()(house))
                    await _rehearse_async(side)
                    rivals.sides.append(side)
            if not _has_ours(rivals):
                found |= _results(contest, Rivals([], [], missing), Taken([], []))
                return found
            with _blamed(rivals):
                taken = await take_turns_async(rivals.sides, **_how(contest, asked))
            found |= _results(contest, rivals, taken)
            if asked.throughput:
                found["throughput"] = await _speeds_async(contest, rivals, asked)
    return found


@contextmanager
def _kept(contest: Contest, found: dict[str, Any]) -> Iterator[None]:
    """Keep what was measured, even if a side cannot close."""
    try:
        yield
    except Exception as error:
        if not found:
            raise
        print(f"{contest.name}, closing: {reason(error)}", file=sys.stderr)


@contextmanager
def _admitted(entrant: Entrant, rivals: Rivals) -> Iterator[None]:
    """Add the entrant, unless it cannot be opened or fails its rehearsal: then say why."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        rivals.missing[entrant.name] = reason(error)
    else:
        rivals.entrants.append(entrant)


@contextmanager
def _blamed(rivals: Rivals) -> Iterator[None]:
    try:
        yield
    except SideFailed as failed:
        raise Without(rivals.entrants[failed.index].name, reason(failed)) from failed


def _present(contest: Contest, rivals: Rivals) -> list[Entrant]:
    return [entrant for entrant in contest.entrants if entrant.name not in rivals.missing]


def _has_ours(rivals: Rivals) -> bool:
    return any(entrant.role == OURS for entrant in rivals.entrants)


def _rehearse(side: Side) -> None:
    """Deliver one key twice: who cannot do that is not measured."""
    key, before = _key(), side.ran()
    side.first(key)
    side.duplicate(key)
    check([side], [before], 1)


async def _rehearse_async(side: Side) -> None:
    key, before = _key(), side.ran()
    await side.first(key)
    await side.duplicate(key)
    check([side], [before], 1)


def _key() -> str:
    return f"{secrets.token_hex(4)}-0000-4000-a000-000000000000"


def _how(contest: Contest, asked: Asked) -> dict[str, Any]:
    rounds = min((limit for limit in (contest.rounds_max, asked.rounds) if limit is not None), default=None)
    return {"seconds": asked.seconds * contest.weight, "rounds": rounds, "burst": contest.burst}


def reason(error: BaseException) -> str:
    """Say in one line why a side is missing."""
    lines = str(error).strip().splitlines()
    words = lines[0] if lines else ""
    if type(error).__name__ not in ("Missing", "ServerFailed", "SideFailed"):
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return words[:REASON_MAX]


def _results(contest: Contest, rivals: Rivals, taken: Taken) -> dict[str, Any]:
    return {
        "name": contest.name,
        "title": contest.title,
        "kind": "async" if contest.is_async else "sync",
        "note": contest.note,
        "rounds": {"first": _count(taken.first), "duplicate": _count(taken.duplicate)},
        "sides": [_side(rivals, index, taken) for index in range(len(rivals.sides))],
        "missing": [
            {"name": entrant.name, "role": entrant.role, "why": rivals.missing[entrant.name]}
            for entrant in contest.entrants
            if entrant.name in rivals.missing
        ],
        "throughput": [],
    }


def _count(times: Sequence[Sequence[float]]) -> int:
    return len(times[0]) if times else 0


def _side(rivals: Rivals, index: int, taken: Taken) -> dict[str, Any]:
    entrant = rivals.entrants[index]
    return {
        "name": entrant.name,
        "role": entrant.role,
        "what": rivals.sides[index].title,
        "version": _version(entrant),
        "first": call_of(taken.first[index], taken.first[rivals.ours]),
        "duplicate": call_of(taken.duplicate[index], taken.duplicate[rivals.ours]),
    }


def _version(entrant: Entrant) -> str:
    try:
        return metadata.version(entrant.package) if entrant.package else ""
    except metadata.PackageNotFoundError:
        return ""


def call_of(times: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return one side's figures of a call; the ratio says how many times longer ours takes."""
    return {
        "p50_us": round(percentile(times, 0.50) * 1e6, 2),
        "p99_us": round(percentile(times, 0.99) * 1e6, 2),
        "ratio": [round(value, 4) for value in ratios(ours, times)],
    }


def _speeds(contest: Contest, rivals: Rivals, asked: Asked) -> list[dict[str, Any]]:
    if not contest.callers:
        return []
    found = []
    with closing(Callers(max(contest.callers))) as callers:
        for side in rivals.sides:
            # Who fails here fails again where it is noted.
            with suppress(Exception):
                callers.warm(side)
        for number in contest.callers:
            course, seconds = Course(rivals.sides), slice_seconds(number, asked.throughput)
            for side, keys, done, failed in course.turns():
                try:
                    done(callers.deliver(side, keys, number, seconds))
                except Exception as error:  # noqa: BLE001 - the row says it
                    failed(error)
            found.append(_named(rivals, course, number))
    return found


async def _speeds_async(contest: Contest, rivals: Rivals, asked: Asked) -> list[dict[str, Any]]:
    found = []
    for number in contest.callers:
        course, seconds, warm = Course(rivals.sides), slice_seconds(number, asked.throughput), set[str]()
        for side, keys, done, failed in course.turns():
            try:
                if side.title not in warm:
                    warm.add(side.title)
                    await warm_async(side, keys, number)
                done(await deliver_async(side, keys, number, seconds))
            except Exception as error:  # noqa: BLE001 - the row says it
                failed(error)
        found.append(_named(rivals, course, number))
    return found


def _named(rivals: Rivals, course: Course, callers: int) -> dict[str, Any]:
    rows = zip(rivals.entrants, course.summary(rivals.ours), strict=True)
    return {"callers": callers, "sides": [{"name": one.name, "role": one.role, **row} for one, row in rows]}
