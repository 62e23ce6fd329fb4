"""Temporal: many activities of one workflow, bare and guarded, for `bench.jobs`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from onefold import AsyncGuard, Guard
from onefold.queues.temporal import guarded
from services.temporal import address_of

# How many activities are under way at once.
AT_ONCE: Final = 100

ACTIVITY_TIMEOUT: Final = timedelta(seconds=30)


@workflow.defn
class Many:
    @workflow.run
    async def run(self, name: str, number: int) -> None:
        for start in range(0, number, AT_ONCE):
            await asyncio.gather(
                *(
                    workflow.execute_activity(name, at, start_to_close_timeout=ACTIVITY_TIMEOUT)
                    for at in range(start, min(start + AT_ONCE, number))
                )
            )


class Activities:
    """A worker with both activities, on an event loop that runs while it is measured."""

    def __init__(self, url: str, guard: Guard | AsyncGuard, bare: Any, ours: Any) -> None:
        logging.getLogger("temporalio").setLevel(logging.CRITICAL)
        self._guard = guard
        self._queue = f"bench-{secrets.token_hex(4)}"
        self._runner = asyncio.Runner()
        self._threads = ThreadPoolExecutor(8)
        functions = [activity.defn(bare), activity.defn(guarded(guard, "bench")(ours))]
        self._client, self._worker = self._runner.run(self._start(url, functions))

    async def _start(self, url: str, functions: list[Any]) -> tuple[Client, Worker]:
        client = await Client.connect(address_of(url))
        worker = Worker(
            client,
            task_queue=self._queue,
            workflows=[Many],
            activities=functions,
            activity_executor=self._threads,
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        await worker.__aenter__()
        return client, worker

    def run(self, name: str, number: int) -> None:
        """Run so many activities of this name."""
        self._runner.run(self._run(name, number))

    async def _run(self, name: str, number: int) -> None:
        workflow_id = f"{self._queue}-{secrets.token_hex(4)}"
        await self._client.execute_workflow(Many.run, args=[name, number], id=workflow_id, task_queue=self._queue)

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()
        self._threads.shutdown()

    async def _close(self) -> None:
        await self._worker.shutdown()
        await self._worker.__aexit__(None, None, None)
        if isinstance(self._guard, AsyncGuard):
            await self._guard.aclose()
