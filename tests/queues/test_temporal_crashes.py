"""Temporal workers that die at the worst moment: SIGKILL after the effect, before Temporal knows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from services.house import House
from tests.queues.temporal_tools import Environment, Order, Process, type_of, until, working
from tests.support import in_time

# After this time the server takes an activity of a dead worker for lost, and tries it again.
LOST = 0.5

Play = Callable[[Callable[[Environment], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def process(temporal_address: str, temporal_name: str, tmp_path: Path, house: House) -> Iterator[Process]:
    with closing(Process(temporal_address, temporal_name, tmp_path, house.home)) as process:
        yield process


@pytest.fixture
def play(temporal_address: str, temporal_name: str) -> Play:
    """Play a story. The workflows are in the test's own process, and survive."""

    def played(story: Callable[[Environment], Coroutine[Any, Any, Any]]) -> Any:
        async def whole() -> Any:
            async with working(temporal_address, temporal_name, []) as environment:
                return await story(environment)

        return in_time(whole())

    return played


def killed_in(process: Process, activity: str) -> Callable[[Environment], Coroutine[Any, Any, Any]]:
    """The worker dies in this activity, and comes again."""

    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order(activity, ["rahul"], queue=process.queue, seconds=LOST))
        await until(lambda: process.is_dead, "it is killed")
        process.start()
        return await handle.result()

    return story


@pytest.mark.parametrize("activity", ["recorded", pytest.param("recorded_async", marks=pytest.mark.more)])
def test_killed_after_the_effect_and_before_temporal_knows_it_is_one_effect_and_the_stored_result(
    process: Process, play: Play, activity: str
) -> None:
    assert play(killed_in(process, activity)) == ["done", "rahul"]
    assert process.times("ran", activity) == 1


@pytest.mark.more
def test_killed_before_the_effect_is_recorded_it_runs_again_with_the_same_key_for_the_other_side(
    process: Process, play: Play
) -> None:
    assert play(killed_in(process, "mail")) == "mailed rahul"
    ran = process.words("ran mail")
    assert (len(ran), len(set(ran))) == (2, 1)


@pytest.mark.more
def test_killed_under_hold_it_waits_for_a_person(process: Process, play: Play) -> None:
    async def story(environment: Environment) -> str:
        handle = await environment.start(Order("invoice", ["rahul"], queue=process.queue, seconds=LOST))
        await until(lambda: process.is_dead, "it is killed")
        process.start()

        async def is_held() -> bool:
            return type_of(await environment.pending(handle)) == "Held"

        await until(is_held, "the lease of the dead worker is over")
        await handle.terminate()
        return "held"

    assert play(story) == "held"
    assert process.times("ran", "invoice") == 1


@pytest.mark.more
def test_killed_in_a_transaction_its_rows_are_there_once(process: Process, play: Play, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "wallet.db")) as wallet:
        wallet.execute("CREATE TABLE wallet (name TEXT)")
        wallet.commit()

        assert play(killed_in(process, "credit")) == "credited rahul"
        assert wallet.execute("SELECT count(*) FROM wallet").fetchone() == (1,)
    assert process.times("ran", "credit") == 2


@pytest.mark.more
def test_a_frozen_worker_that_comes_back_has_run_it_once_and_its_result_counts(
    process: Process, play: Play, tmp_path: Path
) -> None:
    async def story(environment: Environment) -> Any:
        handle = await environment.start(Order("slow", ["rahul"], queue=process.queue, seconds=LOST))
        await until(lambda: process.times("ran", "slow"), "it runs")
        process.daemon.stop()

        async def has_timed_out() -> bool:
            description = await handle.describe(rpc_timeout=timedelta(seconds=5))
            pending = description.raw_description.pending_activities
            return bool(pending) and pending[0].attempt >= 2

        await until(has_timed_out, "the server has given the first attempt up")
        process.daemon.cont()
        await until(lambda: process.times("refused", "slow"), "the second attempt has found it running")
        (tmp_path / "gate").touch()
        return await handle.result()

    assert play(story) == "slow rahul"
    assert process.times("ran", "slow") == 1


@pytest.mark.more
def test_a_local_activity_has_the_same_key_after_its_worker_was_killed(process: Process, play: Play) -> None:
    async def story(environment: Environment) -> Any:
        handle = await environment.start(
            Order("recorded", ["rahul"], local=True),
            task_queue=process.queue,
            # After this time the server gives the workflow to another worker.
            task_timeout=timedelta(seconds=1),
        )
        await until(lambda: process.is_dead, "it is killed")
        process.start()
        return await handle.result()

    assert play(story) == ["done", "rahul"]
    assert process.times("ran", "recorded") == 1
