"""Workflows on a real Temporal server, with a worker for activities in the test's own process, or in another."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from services.home import Home
from services.processes import Daemon
from tests.processes import Notes
from tests.support import PATIENCE, PROJECT

# A failed attempt is tried again at once, unless the activity says otherwise.
SOON = 0.01


@dataclass
class Order:
    """One activity, as a workflow schedules it."""

    activity: str
    args: list[Any] = field(default_factory=list)
    queue: str | None = None
    activity_id: str | None = None
    seconds: float = PATIENCE
    heartbeat: float | None = None
    attempts: int = 0
    local: bool = False
    # How often the workflow continues as new before it is done.
    continues: int = 0


@workflow.defn
class Once:
    """Runs one activity, and returns its result."""

    @workflow.run
    async def run(self, order: Order) -> Any:
        options: dict[str, Any] = {
            "args": order.args,
            "activity_id": order.activity_id,
            "start_to_close_timeout": timedelta(seconds=order.seconds),
            "retry_policy": RetryPolicy(
                initial_interval=timedelta(seconds=SOON), backoff_coefficient=1.0, maximum_attempts=order.attempts
            ),
        }
        if order.local:
            result = await workflow.execute_local_activity(order.activity, **options)
        else:
            beat = None if order.heartbeat is None else timedelta(seconds=order.heartbeat)
            result = await workflow.execute_activity(
                order.activity, task_queue=order.queue, heartbeat_timeout=beat, **options
            )
        if order.continues:
            order.continues -= 1
            workflow.continue_as_new(order)
        return result


@workflow.defn
class Twice:
    """Runs the same activity twice, one after the other."""

    @workflow.run
    async def run(self, order: Order) -> list[Any]:
        limit = timedelta(seconds=order.seconds)
        return [
            await workflow.execute_activity(order.activity, args=order.args, start_to_close_timeout=limit)
            for _ in range(2)
        ]


@workflow.defn
class Cancelling:
    """Cancels its activity once it is told to, and returns what that ended with."""

    def __init__(self) -> None:
        self._is_told = False

    @workflow.run
    async def run(self, order: Order) -> str:
        handle = workflow.start_activity(
            order.activity,
            args=order.args,
            start_to_close_timeout=timedelta(seconds=order.seconds),
            heartbeat_timeout=timedelta(seconds=order.heartbeat or PATIENCE),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        await workflow.wait_condition(lambda: self._is_told)
        handle.cancel()
        try:
            return str(await handle)
        except ActivityError as error:
            return type(error.cause).__name__

    @workflow.signal
    def cancel(self) -> None:
        self._is_told = True


class Environment:
    """A client, and a worker whose activities are given."""

    def __init__(self, client: Client, queue: str) -> None:
        self.client = client
        self.queue = queue
        self._started = 0

    async def start(self, order: Order, kind: Any = Once, **options: Any) -> WorkflowHandle[Any, Any]:
        self._started += 1
        options = {"id": f"{self.queue}-{self._started}", "task_queue": self.queue, **options}
        return await self.client.start_workflow(kind.run, order, **options)

    async def run(self, activity: Any, *args: Any, **options: Any) -> Any:
        """The result of a workflow that runs this activity."""
        name = getattr(activity, "__name__", activity)
        order = {one: options.pop(one) for one in list(options) if one in Order.__dataclass_fields__}
        handle = await self.start(Order(name, list(args), **order), **options)
        return await handle.result()

    async def fails(self, activity: Any, *args: Any, **options: Any) -> ApplicationError:
        """The error with which an activity fails for good."""
        with pytest.raises(WorkflowFailureError) as raised:
            await self.run(activity, *args, **options)
        failed = raised.value.cause
        assert isinstance(failed, ActivityError)
        assert isinstance(failed.cause, ApplicationError)
        return failed.cause

    async def pending(self, handle: WorkflowHandle[Any, Any]) -> Any:
        """What the server says of the only activity of a workflow, once it waits for another attempt."""
        found: list[Any] = []

        async def waits() -> bool:
            description = await handle.describe()
            found[:] = description.raw_description.pending_activities
            scheduled = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
            return bool(found) and found[0].state == scheduled and found[0].HasField("last_failure")

        await until(waits, "an attempt has failed")
        return found[0]


def type_of(pending: Any) -> str:
    return str(pending.last_failure.application_failure_info.type)


def delay_of(pending: Any) -> float:
    """How long the server waits before the next attempt."""
    seconds: float = pending.current_retry_interval.ToTimedelta().total_seconds()
    return round(seconds, 2)


async def until(holds: Callable[[], Any], what: str) -> None:
    """Wait until it holds; it may have to be awaited."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = holds()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def working(address: str, queue: str, activities: Sequence[Any], **options: Any) -> AsyncIterator[Environment]:
    client = await Client.connect(address)
    with ThreadPoolExecutor(8) as threads:
        worker = Worker(
            client,
            task_queue=queue,
            workflows=[Once, Twice, Cancelling],
            activities=list(activities),
            activity_executor=threads,
            # The sandbox would import the modules of the tests once more for each workflow.
            workflow_runner=UnsandboxedWorkflowRunner(),
            # A cancellation comes with the answer to a heartbeat, of which the SDK sends one in this time.
            max_heartbeat_throttle_interval=timedelta(seconds=0.1),
            **options,
        )
        async with worker:
            yield Environment(client, queue)


class Process:
    """A worker for activities in a process of its own, to be killed."""

    def __init__(self, address: str, queue: str, folder: Path, home: Home) -> None:
        self.notes = Notes(folder / "notes")
        self._before = 0
        self.queue = f"{queue}-activities"
        setting = {"address": address, "queue": self.queue, "folder": str(folder)}
        self.daemon = Daemon(
            "temporal-worker",
            [sys.executable, "-W", "ignore", "-m", "tests.queues.temporal_worker"],
            folder,
            answers=lambda: self.times("ready") > self._before,
            environment={
                "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
                "ONEFOLD_TEMPORAL": json.dumps(setting),
            },
        )
        # It ends with the session, whatever becomes of that.
        home.keep(self.daemon)

    def times(self, *noted: str) -> int:
        """How often something was written down that begins with these words."""
        begin = " ".join(noted)
        return sum(f"{line} ".startswith(f"{begin} ") for line in self.notes.read())

    def words(self, *noted: str) -> list[str]:
        begin = " ".join(noted)
        return [line for line in self.notes.read() if line.startswith(begin)]

    @property
    def is_dead(self) -> bool:
        return not self.daemon.running

    def start(self) -> None:
        """Once more, after it has died."""
        self._before = self.times("ready")
        self.daemon.start()

    def close(self) -> None:
        self.daemon.kill()
