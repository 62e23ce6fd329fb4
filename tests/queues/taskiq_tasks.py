"""Make the tasks of the taskiq tests, alike in the test and in its workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nats.js.api import ConsumerConfig
from taskiq import SimpleRetryMiddleware
from taskiq_aio_pika import AioPikaBroker, Exchange, Queue
from taskiq_nats import PullBasedJetStreamBroker
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from onefold import AsyncGuard, Event, Guard, Policy, current
from onefold.queues.taskiq import guarded
from tests.processes import Notes
from tests.support import PATIENCE

# Long enough for a renewal on a busy machine, short enough to wait for its end.
LEASE = 2.0

# After how long a silent worker's messages are delivered again, in seconds.
SILENCE = 1.0


class Setting(NamedTuple):
    """Where the tasks of one place live; a worker gets it through its environment."""

    kind: str
    broker: str
    redis: str
    folder: str
    queue: str


def broker_of(setting: Setting) -> Any:
    name, silence = setting.queue, int(SILENCE * 1000)
    if setting.kind == "rabbitmq":
        dead = Queue(name=f"{name}.dead")
        return AioPikaBroker(
            setting.broker, exchange=Exchange(name=name), task_queues=[Queue(name=name)], dead_letter_queue=dead
        )
    if setting.kind == "nats":
        return PullBasedJetStreamBroker(
            setting.broker,
            subject=name,
            stream_name=name,
            durable=name,
            consumer_config=ConsumerConfig(durable_name=name, ack_wait=SILENCE),
            pull_consume_timeout=0.2,
        )
    return RedisStreamBroker(setting.broker, queue_name=name, xread_block=100, idle_timeout=silence)


class Shop:
    """A broker with its guards, and the notes of its tasks."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self.broker = broker_of(setting)
        self.broker.with_result_backend(RedisAsyncResultBackend(setting.redis, result_ex_time=600))
        self.broker.add_middlewares(SimpleRetryMiddleware())
        policy = Policy(lease=LEASE, keep="1h")
        self.guard = AsyncGuard(setting.redis, policy=policy, on_event=self.heard)
        self.guard_sync = Guard(setting.redis, policy=policy, on_event=self.heard)
        self.wallet = Guard(f"sqlite:///{self.folder}/wallet.db", policy=policy, on_event=self.heard)
        self.tasks: dict[str, Any] = {}
        for several in (that_return, that_wait, that_fail, that_die):
            several(self)

        async def nudge() -> None:
            """Do nothing: a listener of Redis looks for abandoned messages after a new one."""

        self.tasks["nudge"] = self.broker.register_task(nudge, "nudge")

    def heard(self, event: Event) -> None:
        self.notes.add(f"{event.kind} {event.operation} {event.address.key}")
        if (event.kind, event.operation) == ("finished", "ship"):
            # Its effect is recorded, and its message is not acknowledged yet.
            self.die_once(event.address.key)

    def task(self, guard: Any = None, **options: Any) -> Callable[[Callable[..., Any]], None]:
        """A guarded task whose operation is the function's name."""

        def decorate(handler: Callable[..., Any]) -> None:
            name = handler.__name__
            given = {"retry_on_error": True, "max_retries": 3, **options}
            made = guarded(guard or self.guard, name, broker=self.broker, task_name=name, **given)
            self.tasks[name] = made(handler)

        return decorate

    def ran(self, *arguments: object) -> None:
        self.notes.add(" ".join(["ran", *map(str, arguments)]))

    def die_once(self, name: str) -> None:
        """SIGKILL to this process, the first time. taskiq starts another."""
        marker = self.folder / f"{name} died"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def wait_for(self, gate: str) -> None:
        end = time.monotonic() + 3 * PATIENCE
        while not (self.folder / gate).exists():
            assert time.monotonic() < end, "nobody opened the gate"
            await asyncio.sleep(0.01)


def that_return(shop: Shop) -> None:
    @shop.task()
    async def add(a: int, b: int) -> int:
        shop.ran("add", a, b)
        return a + b

    @shop.task(shop.guard_sync)
    def add_sync(a: int, b: int) -> int:
        shop.ran("add_sync", a, b)
        return a + b

    @shop.task(key="payment_id")
    async def pay(payment_id: str, amount: int) -> str:
        shop.ran("pay", payment_id, amount)
        return f"paid {amount}"


def that_wait(shop: Shop) -> None:
    # Its lease does not end while anybody looks.
    @shop.task(wait=0.1, retry_on_error=False, lease="1h")
    async def slow(gate: str) -> str:
        shop.ran("slow", gate)
        await shop.wait_for(gate)
        return "slow"


def that_fail(shop: Shop) -> None:
    @shop.task()
    async def shaky(name: str, times: int) -> str:
        shop.ran("shaky", name)
        if len([line for line in shop.notes.read() if line == f"ran shaky {name}"]) <= times:
            raise ValueError("not yet")
        return "at last"


def that_die(shop: Shop) -> None:
    @shop.task(shop.wallet)
    def credit(name: str, *, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO wallet VALUES (?, 1)", (name,))
        shop.die_once(name)

    # Ended after the effect, and before anything is recorded.
    @shop.task()
    async def mail(name: str) -> str:
        shop.ran("mail", name, current().key_for("mail"))
        shop.die_once(name)
        return "mailed"

    @shop.task()
    async def ship(name: str) -> str:
        shop.ran("ship", name)
        return "shipped"

    @shop.task(after_crash="hold", wait=0.1)
    async def invoice(name: str) -> str:
        shop.ran("invoice", name)
        shop.die_once(name)
        return "invoiced"


if "ONEFOLD_TASKIQ" in os.environ:
    broker = Shop(Setting(*json.loads(os.environ["ONEFOLD_TASKIQ"]))).broker
