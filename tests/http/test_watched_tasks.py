"""A task that is waited for without being cancelled: by `asyncio.wait`'s rules, in fewer turns of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from onefold.http._asgi.tasks import WatchedTask


def test_whoever_waits_is_woken_in_the_turn_after_the_end() -> None:
    async def story() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            turns.clear()

        async def count() -> None:
            while True:
                turns.append(None)
                await asyncio.sleep(0)

        turns, ended = list[None](), list[None]()
        watched, counting = WatchedTask(work(), lambda: ended.append(None)), asyncio.ensure_future(count())
        await watched.wait()

        assert watched.task.done()
        assert len(turns) <= 1
        assert ended
        counting.cancel()

    asyncio.run(story())


def test_a_cancelled_waiter_leaves_the_task_alone_and_may_wait_again() -> None:
    async def story() -> None:
        gate = asyncio.Event()

        async def work() -> None:
            await gate.wait()

        watched = WatchedTask(work(), lambda: None)
        waiter = asyncio.ensure_future(watched.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not watched.task.done()
        asyncio.get_running_loop().call_soon(gate.set)
        await watched.wait()

        assert watched.task.result() is None

    asyncio.run(story())


@pytest.mark.parametrize("begun", [True, False])
def test_the_end_of_a_cancelled_task_is_told_even_if_it_has_not_begun(begun: bool) -> None:
    async def story() -> list[None]:
        ended = list[None]()
        work = asyncio.Event()

        async def waits() -> None:
            await work.wait()

        coroutine = waits()
        watched = WatchedTask(coroutine, lambda: ended.append(None))
        if begun:
            await asyncio.sleep(0)
        watched.task.cancel()
        await watched.wait()
        await asyncio.sleep(0)
        assert watched.task.cancelled()
        coroutine.close()
        return ended

    assert asyncio.run(story())
