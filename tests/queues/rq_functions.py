"""The functions of the RQ tests, as a worker imports them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from onefold import AsyncGuard, Event, Guard, Policy, current
from onefold.queues.rq import guarded
from tests.processes import Notes
from tests.support import PATIENCE

# Long enough for a renewal on a busy machine, short enough to wait for its end.
LEASE = 2.0


class Setting(NamedTuple):
    """Where the functions of one place live; a worker gets it through its environment."""

    redis: str
    folder: str
    queue: str


SETTING = Setting(*json.loads(os.environ.get("ONEFOLD_RQ", '["memory:", "", ""]')))
FOLDER = Path(SETTING.folder)
NOTES = Notes(FOLDER / "notes")


def heard(event: Event) -> None:
    NOTES.add(f"{event.kind} {event.operation} {event.address.key}")


POLICY = Policy(lease=LEASE, keep="1h")
GUARD = Guard(SETTING.redis, policy=POLICY, on_event=heard)
GUARD_ASYNC = AsyncGuard(SETTING.redis, policy=POLICY, on_event=heard)
WALLET = Guard(f"sqlite:///{FOLDER}/wallet.db", policy=POLICY, on_event=heard)


def ran(*arguments: object) -> None:
    NOTES.add(" ".join(["ran", *map(str, arguments)]))


def die_once(name: str, *, parent: bool = False) -> None:
    """SIGKILL to this work horse, and if asked for to its worker, the first time."""
    marker = FOLDER / f"{name} died"
    if not marker.exists():
        marker.touch()
        if parent:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(gate: str) -> None:
    end = time.monotonic() + 3 * PATIENCE
    while not (FOLDER / gate).exists():
        assert time.monotonic() < end, "nobody opened the gate"
        time.sleep(0.01)


@guarded(GUARD, "add")
def add(a: int, b: int) -> int:
    ran("add", a, b)
    return a + b


@guarded(GUARD_ASYNC, "add_async")
async def add_async(a: int, b: int) -> int:
    ran("add_async", a, b)
    return a + b


# Its lease does not end while anybody looks.
@guarded(GUARD, "slow", wait=0.1, lease="1h")
def slow(gate: str) -> str:
    ran("slow", gate)
    wait_for(gate)
    return "slow"


@guarded(GUARD, "lasting", wait=0.1)
def lasting(gate: str) -> str:
    ran("lasting", gate)
    wait_for(gate)
    return "lasting"


@guarded(GUARD, "shaky")
def shaky(name: str, times: int) -> str:
    ran("shaky", name)
    if NOTES.read().count(f"ran shaky {name}") <= times:
        raise ValueError("not yet")
    return "at last"


# Ended after the effect, and before anything is recorded.
@guarded(GUARD, "mail")
def mail(name: str) -> str:
    ran("mail", name, current().key_for("mail"))
    die_once(name)
    return "mailed"


@guarded(GUARD, "invoice", after_crash="hold", wait=0.1)
def invoice(name: str) -> str:
    ran("invoice", name)
    die_once(name)
    return "invoiced"


@guarded(WALLET, "credit")
def credit(name: str, *, tx: sqlite3.Connection) -> None:
    tx.execute("INSERT INTO wallet VALUES (?, 1)", (name,))
    die_once(name, parent=True)
