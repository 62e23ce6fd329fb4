"""Make the actors of the Dramatiq tests, alike in the test and in its workers."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from onefold import AsyncGuard, Event, Guard, Policy, current
from onefold.queues.dramatiq import guarded
from tests.processes import Notes
from tests.support import PATIENCE

# Long enough for a renewal on a busy machine, short enough to wait for its end.
LEASE = 2.0

# How long a worker of a Redis broker may be silent, in milliseconds: less than an idle one is (a second).
SILENCE = 300


class Setting(NamedTuple):
    """Where the actors of one place live; a worker gets it through its environment."""

    broker: str
    redis: str
    folder: str
    queue: str


class Shop:
    """A broker with its guards, and the notes of its actors."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self.broker: Any
        if setting.broker.startswith("amqp"):
            self.broker = RabbitmqBroker(url=setting.broker)
        else:
            self.broker = RedisBroker(
                url=setting.broker, heartbeat_timeout=SILENCE, maintenance_chance=1_000_000, namespace=setting.queue
            )
        self.results = RedisBackend(url=setting.redis)
        self.broker.add_middleware(Results(backend=self.results))
        self.broker.add_middleware(AsyncIO())
        policy = Policy(lease=LEASE, keep="1h")
        self.guard = Guard(setting.redis, policy=policy, on_event=self.heard)
        self.guard_async = AsyncGuard(setting.redis, policy=policy, on_event=self.heard)
        self.wallet = Guard(f"sqlite:///{self.folder}/wallet.db", policy=policy, on_event=self.heard)
        self.actors: dict[str, Any] = {}
        for several in (that_return, that_wait, that_fail, that_die):
            several(self)

    def heard(self, event: Event) -> None:
        self.notes.add(f"{event.kind} {event.operation} {event.address.key}")
        if (event.kind, event.operation) == ("finished", "ship"):
            # Its effect is recorded, and its message is not acknowledged yet.
            self.die_once(event.address.key)

    def actor(self, guard: Any = None, **options: Any) -> Callable[[Callable[..., Any]], None]:
        """A guarded actor whose operation is the function's name."""

        def decorate(handler: Callable[..., Any]) -> None:
            name = handler.__name__
            given = {"store_results": True, "min_backoff": 10, "max_backoff": 50, "max_retries": 2, **options}
            made = guarded(guard or self.guard, name, broker=self.broker, queue_name=self.setting.queue, **given)
            self.actors[name] = made(handler)

        return decorate

    def ran(self, *arguments: object) -> None:
        self.notes.add(" ".join(["ran", *map(str, arguments)]))

    def die_once(self, name: str) -> None:
        """SIGKILL to this process, the first time."""
        marker = self.folder / f"{name} died"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for(self, gate: str) -> None:
        end = time.monotonic() + 3 * PATIENCE
        while not (self.folder / gate).exists():
            assert time.monotonic() < end, "nobody opened the gate"
            time.sleep(0.01)


def that_return(shop: Shop) -> None:
    @shop.actor()
    def add(a: int, b: int) -> int:
        shop.ran("add", a, b)
        return a + b

    @shop.actor(shop.guard_async)
    async def add_async(a: int, b: int) -> int:
        shop.ran("add_async", a, b)
        return a + b

    @shop.actor(key="payment_id")
    def pay(payment_id: str, amount: int) -> str:
        shop.ran("pay", payment_id, amount)
        return f"paid {amount}"


def that_wait(shop: Shop) -> None:
    # Its lease does not end while anybody looks.
    @shop.actor(wait=0.1, max_retries=0, lease="1h")
    def slow(gate: str) -> str:
        shop.ran("slow", gate)
        shop.wait_for(gate)
        return "slow"

    @shop.actor(time_limit=400, after_crash="hold")
    def limited(gate: str) -> str:
        shop.ran("limited", gate)
        shop.wait_for(gate)
        return "limited"


def that_fail(shop: Shop) -> None:
    @shop.actor()
    def shaky(name: str, times: int) -> str:
        shop.ran("shaky", name)
        if len([line for line in shop.notes.read() if line == f"ran shaky {name}"]) <= times:
            raise ValueError("not yet")
        return "at last"


def that_die(shop: Shop) -> None:
    @shop.actor(shop.wallet)
    def credit(name: str, *, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO wallet VALUES (?, 1)", (name,))
        shop.die_once(name)

    # Ended after the effect, and before anything is recorded.
    @shop.actor()
    def mail(name: str) -> str:
        shop.ran("mail", name, current().key_for("mail"))
        shop.die_once(name)
        return "mailed"

    @shop.actor()
    def ship(name: str) -> str:
        shop.ran("ship", name)
        return "shipped"

    @shop.actor(after_crash="hold", wait=0.1)
    def invoice(name: str) -> str:
        shop.ran("invoice", name)
        shop.die_once(name)
        return "invoiced"


def made(setting: Setting) -> Shop:
    return Shop(setting)


if "ONEFOLD_DRAMATIQ" in os.environ:
    dramatiq.set_broker(made(Setting(*json.loads(os.environ["ONEFOLD_DRAMATIQ"]))).broker)
