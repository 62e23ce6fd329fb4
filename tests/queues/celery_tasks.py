"""Make the tasks of the Celery tests, alike in the test and in its workers (`celery -A tests.queues.celery_tasks`)."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from celery.exceptions import Ignore
from kombu import Queue

from onefold import Event, Guard, Policy, RecordColumn, current
from onefold.queues.celery import OnefoldTask, guarded
from onefold.queues.keys import content_hash
from onefold.stores.sqlite import SqliteStore
from tests.processes import Notes
from tests.support import PATIENCE

# Long enough for a renewal on a busy machine, short enough to wait for its end.
LEASE = 2.0

# How long Redis keeps the message of a dead worker from the others: longer than any test takes. See `give_back`.
VISIBILITY = 3_600


class Setting(NamedTuple):
    """Where the tasks of one place live; a worker gets it through its environment."""

    broker: str
    backend: str
    records: str
    # Records on a server that a test takes away.
    fragile: str
    folder: str
    queue: str
    pool: str


def queues(setting: Setting) -> list[Queue]:
    """One queue; on RabbitMQ with a dead-letter queue behind it."""
    if not setting.broker.startswith("amqp"):
        return [Queue(setting.queue)]
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{setting.queue}-dead"}
    return [Queue(setting.queue, queue_arguments=dead)]


class Shop:
    """An app with its guards, which are open before a worker forks, and the notes of its tasks."""

    def __init__(self, setting: Setting) -> None:
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self.app = Celery("shop", broker=setting.broker, backend=setting.backend)
        self.app.conf.update(
            task_default_queue=setting.queue,
            task_queues=queues(setting),
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            worker_prefetch_multiplier=1,
            broker_connection_retry_on_startup=True,
            broker_transport_options={"visibility_timeout": VISIBILITY},
        )
        self.guard = self.guard_on(setting.records)
        self.guard.read("add", "before the fork")
        self.fragile = self.guard_on(setting.fragile)
        self.wallet = self.guard_on(SqliteStore(self.folder / "wallet.db"))

    def guard_on(self, store: Any) -> Guard:
        return Guard(store, policy=Policy(lease=LEASE, keep="1h"), on_event=self.heard)

    def heard(self, event: Event) -> None:
        self.notes.add(f"{event.kind} {event.operation} {event.address.key}")

    def task(self, guard: Guard | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """A guarded task whose operation is the function's name."""

        def decorate(handler: Callable[..., Any]) -> Any:
            name = handler.__name__
            return guarded(self.app, guard or self.guard, name, name=f"shop.{name}", shared=False, **options)(handler)

        return decorate

    def ran(self, *arguments: object) -> None:
        self.notes.add(" ".join(["ran", *map(str, arguments)]))

    def die_once(self, name: str) -> None:
        """SIGKILL to this process, the first time."""
        marker = self.folder / f"{name} died"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def made(setting: Setting) -> Celery:
    """The app with all of its tasks."""
    shop = Shop(setting)
    for several in (that_return, that_wait, that_fail, that_die, with_other_keys):
        several(shop)
    shop.app.finalize()
    return shop.app


def that_return(shop: Shop) -> None:
    @shop.task()
    def add(a: int, b: int) -> int:
        shop.ran("add", a, b)
        return a + b

    @shop.task()
    def total(parts: list[int]) -> int:
        shop.ran("total", *parts)
        return sum(parts)

    @shop.task()
    def tell(value: Any) -> None:
        shop.ran("tell", value)

    @shop.task(bind=True)
    def count_down(self: Any, n: int) -> str:
        shop.ran("count_down", n)
        return "zero" if n == 0 else self.replace(self.s(n - 1))

    class Large(OnefoldTask):
        guard = shop.guard
        policy = shop.guard.policy.replace(keep_result=False)

    @shop.app.task(base=Large, operation="large", name="shop.large", shared=False)
    def large(word: str) -> str:
        shop.ran("large", word)
        return word


def that_wait(shop: Shop) -> None:
    def wait_for(gate: str) -> int:
        end = time.monotonic() + 3 * PATIENCE
        while not (shop.folder / gate).exists():
            assert time.monotonic() < end, "nobody opened the gate"
            time.sleep(0.01)
        return 7

    # Its lease does not end while anybody looks.
    @shop.task(bind=True, wait=0.2, max_retries=0, policy=shop.guard.policy.replace(lease="1h"))
    def slow(self: Any, gate: str) -> int:
        shop.ran("slow", gate, self.request.retries)
        return wait_for(gate)

    @shop.task(wait=0.2)
    def lasting(gate: str) -> int:
        shop.ran("lasting", gate)
        return wait_for(gate)

    @shop.task(shop.fragile, bind=True, max_retries=0)
    def fragile(self: Any, name: str) -> str:
        shop.ran("fragile", name, self.request.retries)
        return name


def that_fail(shop: Shop) -> None:
    @shop.task(bind=True, max_retries=2)
    def retries(self: Any, name: str, fails: int) -> str:
        shop.ran("retries", name, self.request.retries, current().key)
        if self.request.retries < fails:
            raise self.retry(countdown=0)
        return name

    @shop.task(bind=True, autoretry_for=(Exception,), retry_kwargs={"countdown": 0, "max_retries": 2})
    def autoretries(self: Any, name: str, fails: int) -> str:
        shop.ran("autoretries", name, self.request.retries)
        if self.request.retries < fails:
            raise ValueError(name)
        return name

    @shop.task(acks_on_failure_or_timeout=False)
    def poison(name: str) -> None:
        shop.ran("poison", name)
        raise ValueError(name)

    @shop.task()
    def ignores(name: str) -> None:
        shop.ran("ignores", name)
        raise Ignore


def that_die(shop: Shop) -> None:
    @shop.task()
    def charge(name: str) -> str:
        shop.ran("charge", name, current().key_for("card"))
        shop.die_once(name)
        return name

    @shop.task(policy=shop.guard.policy.replace(after_crash="hold"), wait=0.2)
    def hold(name: str) -> str:
        shop.ran("hold", name)
        shop.die_once(name)
        return name

    class DyingAfter(OnefoldTask):
        """Its worker dies when all is committed, and Celery does not know it yet."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            value = super().__call__(*args, **kwargs)
            if args[-1] == "after the commit":
                shop.die_once(args[0])
            return value

    @shop.task(shop.wallet, base=DyingAfter)
    def credit(name: str, amount: int, when: str, *, tx: sqlite3.Connection) -> int:
        shop.ran("credit", name)
        tx.execute("INSERT INTO wallet VALUES (?, ?)", (name, amount))
        if when == "before the commit":
            shop.die_once(name)
        return amount

    row = RecordColumn("payments", "name", result="receipt", fingerprint="fingerprint")

    @shop.task(shop.wallet, record=row)
    def pay(name: str, amount: int, *, tx: sqlite3.Connection) -> str:
        shop.ran("pay", name)
        tx.execute("INSERT INTO payments (name, amount) VALUES (?, ?) ON CONFLICT DO NOTHING", (name, amount))
        return f"receipt of {amount}"


def with_other_keys(shop: Shop) -> None:
    @shop.task(missing_key="run")
    def unkeyed(name: str) -> None:
        shop.ran("unkeyed", name)

    @shop.task(key="order.id")
    def ship(order: dict[str, Any]) -> str:
        shop.ran("ship", order["id"])
        return str(order["id"])

    @shop.task(key=content_hash(fields=["mail"], identical_payloads_are_duplicates=True), fingerprint=None)
    def mail(mail: str, sent: int) -> None:
        shop.ran("mail", mail)


# A worker is told where it lives.
if "ONEFOLD_CELERY" in os.environ:
    app = made(Setting(*json.loads(os.environ["ONEFOLD_CELERY"])))
