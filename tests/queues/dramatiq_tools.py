"""Dramatiq's worker by hand, in the test's own thread, and real workers as processes."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import dramatiq
import pika
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware, MiddlewareError, default_middleware
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from dramatiq.worker import WorkerThread, _WorkQueueItem
from redis import Redis

from services.home import Home
from services.processes import Daemon
from tests.queues.dramatiq_actors import Setting, Shop
from tests.support import PATIENCE, PROJECT


class Hand:
    """A stub broker with results, and what became of each message: acknowledged, or dead."""

    def __init__(self, middleware: Iterable[Middleware] | None = None) -> None:
        made = [one() for one in default_middleware] if middleware is None else list(middleware)
        self.broker = Recording(middleware=made)
        self.results = StubBackend()
        self.broker.add_middleware(Results(backend=self.results))
        self.ended: list[str] = []
        self._waiting: queue.PriorityQueue[_WorkQueueItem] = queue.PriorityQueue()
        self._thread = WorkerThread(
            broker=self.broker, consumers=_Every(self), work_queue=self._waiting, worker_timeout=1
        )

    def post_process_message(self, message: MessageProxy) -> None:
        signal = "nack" if message.failed else "ack"
        try:
            self.broker.emit_before(signal, message)
        except MiddlewareError:
            self.ended.append("kept")
            return
        self.ended.append("dead" if message.failed else "acknowledged")
        self.broker.emit_after(signal, message)

    def process(self, message: Any) -> MessageProxy:
        """As a worker's thread does it, once the message has come off the wire."""
        proxy = MessageProxy(dramatiq.Message.decode(message.encode()))
        self._waiting.put(_WorkQueueItem(0, proxy))
        self._waiting.get()
        self._thread.process_message(proxy)
        return proxy

    def take(self, name: str = "default") -> MessageProxy:
        """Process the next message of a queue."""
        return self.process(self.next_of(name))

    def next_of(self, name: str = "default") -> dramatiq.Message[Any]:
        return dramatiq.Message.decode(self.broker.queues[name].get_nowait())

    def size(self, name: str = "default") -> int:
        return int(self.broker.queues[name].qsize())

    def delayed(self) -> dramatiq.Message[Any]:
        """The next message that waits, as it is when its time has come."""
        found = self.next_of("default.DQ")
        del found.options["eta"]
        return found.copy(queue_name="default")


class Recording(StubBroker):
    """Remembers for how many milliseconds each message was delayed."""

    def __init__(self, middleware: list[Middleware]) -> None:
        super().__init__(middleware=middleware)
        self.delays: list[int | None] = []

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        found = super().enqueue(message, delay=delay)
        self.delays.append(delay)
        return found


class _Every(dict[str, Any]):
    """One consumer for every queue."""

    def __init__(self, hand: Hand) -> None:
        super().__init__()
        self._hand = hand

    def __missing__(self, name: str) -> Hand:
        return self._hand


class Environment:
    """The actors of one broker, a worker for them, and what they have written down."""

    def __init__(self, setting: Setting, home: Home, *, worker_broker: str | None = None) -> None:
        self.setting = setting
        self.folder = Path(setting.folder)
        self.shop = Shop(setting)
        self._starts = 1
        theirs = setting._replace(broker=worker_broker or setting.broker)
        self._worker = Daemon(
            "dramatiq",
            [sys.executable, "-W", "ignore", "-m", "dramatiq", "-p", "1", "-t", "4", "tests.queues.dramatiq_actors"],
            self.folder,
            answers=lambda: self._worker.log.read_text().count("Worker process is ready for action") >= self._starts,
            environment={
                "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
                "ONEFOLD_DRAMATIQ": json.dumps(theirs),
                # A consumer that has lost its connection comes back at once.
                "dramatiq_restart_delay": "100",
            },
        )
        # It ends with the session, whatever becomes of that.
        home.keep(self._worker)

    def __getattr__(self, name: str) -> Any:
        return self.shop.actors[name]

    def kill(self) -> None:
        """SIGKILL to the worker and all of its children."""
        self._worker.kill()

    def start(self) -> None:
        """Once more, after a kill."""
        self._starts += 1
        self._worker.start()

    def revive(self) -> None:
        """Start the worker again, after one of its processes has died: Dramatiq then ends all others."""
        self.until(lambda: not self._worker.running)
        self.start()

    def close(self) -> None:
        self.kill()
        self.shop.broker.close()
        self.shop.guard.close()
        self.shop.wallet.close()

    def send(self, name: str, *args: Any, key: str, **options: Any) -> Any:
        actor = self.shop.actors[name]
        return actor.send_with_options(args=args, idempotency_key=key, **options)

    def result(self, message: Any) -> Any:
        return message.get_result(backend=self.shop.results, block=True, timeout=int(PATIENCE * 1000))

    def again(self, message: Any) -> None:
        """The same message once more."""
        self.shop.broker.enqueue(dramatiq.Message.decode(message.encode()))

    def dead(self) -> int:
        """How many messages are in the dead-letter queue."""
        name = f"{self.setting.queue}.XQ"
        if self.setting.broker.startswith("amqp"):
            with pika.BlockingConnection(pika.URLParameters(self.setting.broker)) as connection:
                return int(connection.channel().queue_declare(name, passive=True).method.message_count)
        with closing(Redis.from_url(self.setting.broker)) as redis:
            return int(redis.zcard(f"{self.setting.queue}:{name}"))

    def open_gate(self, name: str) -> None:
        (self.folder / name).touch()

    def times(self, *noted: str) -> int:
        """How often something was written down that begins with these words."""
        begin = " ".join(noted)
        return sum(f"{line} ".startswith(f"{begin} ") for line in self.shop.notes.read())

    def until(self, holds: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self._worker.log.read_text()[-4000:]
            time.sleep(0.02)

    def until_noted(self, *noted: str, times: int = 1) -> None:
        self.until(lambda: self.times(*noted) >= times)
