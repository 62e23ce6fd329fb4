"""A worker that dies: `python -m tests.queues.temporal_worker`. Each activity kills it once, at its own moment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from onefold import AsyncGuard, Event, Guard, current
from onefold.events import Kind
from onefold.queues.temporal import guarded
from tests.processes import Notes
from tests.queues.temporal_tools import Once
from tests.support import PATIENCE

SETTING: Final[dict[str, Any]] = json.loads(os.environ.get("ONEFOLD_TEMPORAL", '{"folder": ""}'))
FOLDER: Final = Path(SETTING["folder"])
NOTES: Final = Notes(FOLDER / "notes")

# Long enough for a renewal on a busy machine, short enough to wait for its end.
LEASE: Final = 2.0


def die_once(name: str) -> None:
    marker = FOLDER / f"{name} died"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def heard(event: Event) -> None:
    NOTES.add(f"{event.kind} {event.operation}")
    if event.kind is Kind.FINISHED and event.operation in ("recorded", "recorded_async"):
        die_once(event.operation)


STORE: Final = f"sqlite:///{FOLDER}/onefold.db" if SETTING["folder"] else "memory:"
GUARD: Final = Guard(STORE, lease=LEASE, keep="1h", on_event=heard)
GUARD_ASYNC: Final = AsyncGuard(STORE, lease=LEASE, keep="1h", on_event=heard)
WALLET: Final = Guard(f"sqlite:///{FOLDER}/wallet.db" if SETTING["folder"] else "memory:", on_event=heard)


# Killed after its effect is recorded, and before Temporal knows.
@activity.defn
@guarded(GUARD, "recorded")
def recorded(name: str) -> list[str]:
    NOTES.add(f"ran recorded {name}")
    return ["done", name]


@activity.defn
@guarded(GUARD_ASYNC, "recorded_async")
async def recorded_async(name: str) -> list[str]:
    NOTES.add(f"ran recorded_async {name}")
    return ["done", name]


# Killed after its effect, and before that is recorded.
@activity.defn
@guarded(GUARD, "mail", wait=0)
def mail(name: str) -> str:
    NOTES.add(f"ran mail {current().key_for('mail')}")
    die_once("mail")
    return f"mailed {name}"


@activity.defn
@guarded(GUARD, "invoice", after_crash="hold", wait=0)
def invoice(name: str) -> str:
    NOTES.add("ran invoice")
    die_once("invoice")
    return f"invoiced {name}"


@activity.defn
@guarded(WALLET, "credit")
def credit(name: str, *, tx: sqlite3.Connection) -> str:
    tx.execute("INSERT INTO wallet VALUES (?)", (name,))
    NOTES.add("ran credit")
    die_once("credit")
    return f"credited {name}"


# Frozen and thawed by the test.
@activity.defn
@guarded(GUARD_ASYNC, "slow", lease="1h", wait=0)
async def slow(name: str) -> str:
    NOTES.add("ran slow")
    end = time.monotonic() + PATIENCE
    while not (FOLDER / "gate").exists():
        assert time.monotonic() < end, "nobody opened the gate"
        await asyncio.sleep(0.01)
    return f"slow {name}"


ACTIVITIES: Final[list[Any]] = [recorded, recorded_async, mail, invoice, credit, slow]


async def main() -> None:
    client = await Client.connect(SETTING["address"])
    with ThreadPoolExecutor(4) as threads:
        worker = Worker(
            client,
            task_queue=SETTING["queue"],
            workflows=[Once],
            activities=ACTIVITIES,
            activity_executor=threads,
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        async with worker:
            NOTES.add("ready")
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
