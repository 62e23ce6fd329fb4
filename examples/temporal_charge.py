"""A Temporal activity that charges once, although its worker is killed. Run it: python examples/temporal_charge.py

It needs a Temporal server: localhost:7233 (`temporal server start-dev`), or the one that ONEFOLD_TEMPORAL_ADDRESS
names. The worker for activities is a process of its own. It is killed after the charge was recorded, and before it
could tell Temporal. The server starts a second attempt, in another worker: that returns the stored result.

Under `after_crash="rerun"`, the default, one case is left: **a worker that is killed after the charge, and before that
is recorded, charges again**, with the same `current().key_for("card")`, by which a card's provider finds the first. If
yours does not, use `after_crash="hold"`. It needs `pip install 'onefold[temporal]'`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Final

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from onefold import Event, Guard, current
from onefold.events import Kind
from onefold.queues.temporal import guarded

# Far longer than it takes, in seconds; it bounds the wait.
PATIENCE: Final = 90.0

ADDRESS: Final = os.environ.get("ONEFOLD_TEMPORAL_ADDRESS", "localhost:7233")
CHARGES: Final = Path("charges.log")
KILLED: Final = Path("killed")


def kill_once(event: Event) -> None:
    """Kill the first worker that has recorded its work, before Temporal is told."""
    if event.kind is Kind.FINISHED and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


guard = Guard("sqlite:///onefold.db", on_event=kill_once)


@activity.defn
@guarded(guard, "charge")
def charge(order: str, cents: int) -> str:
    with CHARGES.open("a", encoding="utf-8") as charges:
        charges.write(f"{order} {cents} {current().key_for('card')}\n")
    return f"{order}: charged {cents}"


@workflow.defn
class Checkout:
    @workflow.run
    async def run(self, order: str, activities: str) -> str:
        # By its name, on the task queue of the workers: this process has none of them.
        result: str = await workflow.execute_activity(
            "charge", args=[order, 4200], task_queue=activities, start_to_close_timeout=timedelta(seconds=2)
        )
        return result


async def work(task_queue: str) -> None:
    """Run the worker for activities, until it is killed."""
    client = await Client.connect(ADDRESS)
    with ThreadPoolExecutor(2) as threads:
        await Worker(client, task_queue=task_queue, activities=[charge], activity_executor=threads).run()


async def main() -> None:
    name = f"onefold-example-{os.getpid()}"
    client = await Client.connect(ADDRESS)
    async with Worker(client, task_queue=name, workflows=[Checkout], workflow_runner=UnsandboxedWorkflowRunner()):
        handle = await client.start_workflow(Checkout.run, args=["o-17", f"{name}-work"], id=name, task_queue=name)
        command = [sys.executable, str(Path(__file__)), f"{name}-work"]
        first = await asyncio.create_subprocess_exec(*command)
        print(f"the first worker ended with {await first.wait()}")
        second = await asyncio.create_subprocess_exec(*command)
        result = await handle.result()
        second.kill()
        await second.wait()
    print(f"the workflow's result: {result}")
    charges = CHARGES.read_text(encoding="utf-8").splitlines()
    print(f"charges: {len(charges)}")
    assert (len(charges), result, first.returncode) == (1, "o-17: charged 4200", -signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(work(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            os.chdir(temporary)
            asyncio.run(asyncio.wait_for(main(), PATIENCE))
            os.chdir("/")
