"""A delivery whose task nobody keeps may be collected, in any thread: then its claim is not renewed any more."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onefold import AsyncGuard, Policy
from tests.support import PATIENCE


def in_this_thread() -> None:
    gc.collect()


def in_another_thread() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def in_a_thread_with_a_loop() -> None:
    async def collect() -> None:
        gc.collect()

    thread = threading.Thread(target=lambda: asyncio.run(collect()))
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("collect", [in_this_thread, in_another_thread, in_a_thread_with_a_loop])
def test_the_claim_of_a_delivery_that_was_collected_ends_with_its_lease(collect: Callable[[], None]) -> None:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    async def deliver() -> list[int]:
        calls: list[int] = []

        async def handler() -> None:
            calls.append(1)

        async with AsyncGuard("memory:", policy=Policy(lease=0.2, wait=PATIENCE)) as guard:
            task: Any = asyncio.create_task(guard.run("pay", "k", never))
            await asyncio.sleep(0.05)
            del task
            collect()
            await guard.run("pay", "k", handler)
        return calls

    gc.disable()
    try:
        assert asyncio.run(deliver()) == [1]
    finally:
        gc.enable()
