"""`make bench` itself, in a run of a few rounds on memory. No times are asserted: a busy machine is no failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.compare import __main__ as compare
from bench.compare import run as running
from bench.compare.contests import LIMIT, OURS, PEER, Contest, Entrant
from bench.compare.run import Asked, run
from bench.install import pins
from bench.measure import Side
from bench.sides import Handler
from services.house import House
from services.programs import Missing


def test_a_run_on_memory_writes_the_results_the_page_and_a_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "memory", "--only", "memory-async", "--rounds", "40", "--seconds", "5"]

    assert compare.main([*options, "--save", "--folder", str(tmp_path), "--format", "json"]) == 0

    shown = capsys.readouterr()
    assert shown.err.splitlines()[:2] == ["1/2 Memory", "2/2 Memory, async"]
    printed = json.loads(shown.out)
    assert printed == json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [contest["name"] for contest in printed["contests"]] == ["memory", "memory-async"]
    for contest in printed["contests"]:
        measured = {side["name"] for side in contest["sides"]}
        assert {"Onefold"} < measured
        # The other libraries are only in the environment of `make bench`.
        assert {"exactly-once", "idemkit"} == {one["name"] for one in contest["missing"]} | (
            measured & {"exactly-once", "idemkit"}
        )
        assert contest["rounds"]["first"] <= 40
    assert "## Memory" in (tmp_path / "index.md").read_text(encoding="utf-8")
    assert (tmp_path / "memory.svg").exists()


def test_the_table_has_the_sides_and_the_bars(capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["--only", "memory", "--rounds", "20", "--seconds", "2", "--no-throughput"])

    shown = capsys.readouterr().out
    assert [word for word in ("Onefold", "BabelQueue", "The bars", "not measured") if word not in shown] == []


def test_a_part_of_the_comparison_is_not_saved_as_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--only", "memory", "--save"])

    assert "--save takes a whole run" in capsys.readouterr().err


def test_what_bench_scale_has_left_is_judged(tmp_path: Path) -> None:
    grown = [{"store": "redis", "records": 10_000, "claim_us": 5.0}]
    assert compare.growth(tmp_path) == []

    (tmp_path / "scale.json").write_text(json.dumps({"growth": [{**grown[0], "bytes": 213}]}))

    assert compare.growth(tmp_path) == grown


Deliver = Callable[[Handler, set[str], str], None]


def well(handler: Handler, seen: set[str], key: str) -> None:
    if key not in seen:
        handler()
        seen.add(key)


def again_and_again(handler: Handler, _seen: set[str], _key: str) -> None:
    handler()


def raises(_handler: Handler, _seen: set[str], _key: str) -> None:
    raise ConnectionError("the server has gone")


def raises_later(handler: Handler, seen: set[str], key: str) -> None:
    if len(seen) == 5:
        raise ConnectionError("the server has gone")
    well(handler, seen, key)


class Stub(Entrant):
    """An entrant whose side is here, and not a module."""

    def opener(self) -> Any:
        return SIDES[self.side]


def side(deliver: Deliver) -> Side:
    handler, seen = Handler(), set[str]()

    def call(key: str) -> None:
        deliver(handler, seen, key)

    return Side("stub", call, call, handler.times)


def opens(deliver: Deliver) -> Any:
    @contextmanager
    def opened(_house: House) -> Iterator[Side]:
        yield side(deliver)

    return opened


def opens_async(deliver: Deliver) -> Any:
    @asynccontextmanager
    async def opened(_house: House) -> AsyncIterator[Side]:
        handler, seen = Handler(), set[str]()

        async def call(key: str) -> None:
            await asyncio.sleep(0)
            deliver(handler, seen, key)

        yield Side("stub", call, call, handler.times)

    return opened


def is_missing(_house: House) -> Any:
    raise Missing("install it: apt-get install it")


@contextmanager
def cannot_close(_house: House) -> Iterator[Side]:
    yield side(well)
    raise OSError("it was closed already")


@contextmanager
def gone(_house: House) -> Iterator[Side]:
    yield side(raises)
    raise ConnectionError("the server has gone")


SIDES: dict[str, Any] = {
    "gone": gone,
    "well": opens(well),
    "twice": opens(again_and_again),
    "raises": opens(raises),
    "later": opens(raises_later),
    "missing": is_missing,
    "cannot close": cannot_close,
    "async well": opens_async(well),
    "async twice": opens_async(again_and_again),
}


def contest(*peers: str, ours: str = "well", callers: tuple[int, ...] = ()) -> Contest:
    is_async = ours.startswith("async")
    entrants = [Stub("Onefold", OURS, ours), Stub("by hand", LIMIT, ours), *(Stub(peer, PEER, peer) for peer in peers)]
    return Contest("stub", "Stub", tuple(entrants), is_async=is_async, callers=callers)


def result(of: Contest, *, throughput: float = 0.01) -> dict[str, Any]:
    with closing(House()) as house:
        return run(of, house, Asked(seconds=5.0, rounds=30, throughput=throughput))


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        ("missing", "install it: apt-get install it"),
        ("raises", "ConnectionError: the server has gone"),
        ("later", "ConnectionError: the server has gone"),
        ("twice", "stub: the handler ran 2 times for 1 keys"),
    ],
)
def test_a_peer_that_fails_is_a_row_that_says_why_and_the_others_are_measured(peer: str, why: str) -> None:
    found = result(contest(peer, "well"))

    assert found["missing"] == [{"name": peer, "role": PEER, "why": why}]
    assert [side["name"] for side in found["sides"]] == ["Onefold", "by hand", "well"]


def test_an_async_peer_that_runs_twice_is_a_row_too() -> None:
    found = result(contest("async twice", ours="async well", callers=(1, 3)))

    assert [one["name"] for one in found["missing"]] == ["async twice"]
    assert [course["callers"] for course in found["throughput"]] == [1, 3]


def test_without_ours_there_is_nothing_to_compare() -> None:
    found = result(contest("well", ours="missing"))

    assert found["sides"] == []
    assert {"Onefold", "by hand"} == {one["name"] for one in found["missing"]}


def test_who_cannot_close_has_been_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(contest("cannot close"))

    assert [side["name"] for side in found["sides"]] == ["Onefold", "by hand", "cannot close"]
    assert "OSError: it was closed already" in capsys.readouterr().err


def test_a_server_that_is_gone_when_its_sides_open_and_when_they_close_is_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = result(contest(ours="gone"))

    assert {one["why"] for one in found["missing"]} == {"ConnectionError: the server has gone"}
    assert "ConnectionError" in capsys.readouterr().err


def test_the_throughput_has_each_number_of_callers() -> None:
    found = result(contest("well", callers=(1, 4)))

    assert [course["callers"] for course in found["throughput"]] == [1, 4]
    for course in found["throughput"]:
        assert [one["name"] for one in course["sides"]] == ["Onefold", "by hand", "well"]
        assert all(one["per_second"] > 0 for one in course["sides"])


def test_a_side_that_runs_twice_under_load_has_no_speed() -> None:
    from bench.compare.throughput import Course

    course = Course([side(well), side(again_and_again)])
    for one, keys, done, _failed in course.turns():
        key = keys()
        one.first(key)
        one.duplicate(key)
        done(1000.0)

    ours, other = course.summary(0)
    assert ours["per_second"] == 1000.0
    assert "the handler ran 2 times for 1 keys" in other["missing"]


def test_a_reason_is_one_line() -> None:
    assert running.reason(ValueError("first\nsecond")) == "ValueError: first"
    assert running.reason(ValueError()) == "ValueError"


def test_each_peer_is_pinned_and_nothing_says_where_it_comes_from() -> None:
    folder = Path(compare.__file__).parents[1]
    wanted = pins((folder / "requirements.in").read_text(encoding="utf-8"))
    pinned = pins((folder / "requirements.txt").read_text(encoding="utf-8"))

    names = {line.partition("==")[0].lower().replace("_", "-") for line in pinned}
    assert {name.partition("[")[0].lower() for name in wanted} - names == set()
    assert [line for line in pinned if "==" not in line or "@" in line or "/" in line or "--" in line] == []
