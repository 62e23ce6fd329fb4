"""taskiq's receiver by hand, one message at a time, and real workers as processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from taskiq import AckableMessage, AsyncBroker, BrokerMessage, TaskiqMessage
from taskiq.brokers.inmemory_broker import InmemoryResultBackend
from taskiq.receiver import Receiver

from services.home import Home
from services.processes import Daemon
from tests.queues.taskiq_tasks import Setting, Shop
from tests.support import PATIENCE, PROJECT, in_own_context


class Recording(AsyncBroker):
    """Remembers what is sent; nobody listens."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[BrokerMessage] = []
        self.refuses = 0

    async def kick(self, message: BrokerMessage) -> None:
        if self.refuses:
            self.refuses -= 1
            raise ConnectionError("nobody answers")
        self.sent.append(message)

    def listen(self) -> AsyncGenerator[AckableMessage, None]:
        raise NotImplementedError


class Hand:
    """A broker with results, a receiver as a worker has one, and which messages were acknowledged."""

    def __init__(self, **options: Any) -> None:
        self.broker = Recording()
        self.results: InmemoryResultBackend[Any] = InmemoryResultBackend()
        self.broker.with_result_backend(self.results)
        self._options = options
        self.acknowledged: list[str] = []
        self._receiver: Receiver | None = None

    async def process(self, sent: Any) -> str:
        """As a worker does it, once the message has come off the wire. Return its id."""
        if self._receiver is None:
            self._receiver = Receiver(self.broker, max_async_tasks=10, **self._options)
        message: TaskiqMessage = self.broker.formatter.loads(sent.message)

        def ack() -> None:
            self.acknowledged.append(message.task_id)

        await in_own_context(self._receiver.callback(AckableMessage(data=sent.message, ack=ack)))
        return message.task_id

    async def take(self) -> str:
        """Process the next message that was sent."""
        return await self.process(self.broker.sent.pop(0))

    def labels(self, sent: Any) -> dict[str, Any]:
        message = self.broker.formatter.loads(sent.message)
        message.parse_labels()
        return message.labels

    async def message(self, task: Any, *args: Any, key: Any = "pay-1", **labels: Any) -> Any:
        """Return a message as its sender makes it, without sending it."""
        given = {**labels, **({} if key is None else {"idempotency_key": key})}
        await task.kicker().with_labels(**given).kiq(*args)
        return self.broker.sent.pop()

    def raw(self, task_name: str, *args: Any, **labels: Any) -> Any:
        """Return a message that no sender of ours has made."""
        message = TaskiqMessage(
            task_id=f"raw-{len(self.acknowledged)}", task_name=task_name, labels=labels, args=list(args), kwargs={}
        )
        return self.broker.formatter.dumps(message)

    async def result(self, task_id: str) -> Any:
        return (await self.results.get_result(task_id)).return_value

    async def error(self, task_id: str) -> BaseException | None:
        return (await self.results.get_result(task_id)).error

    async def has_result(self, task_id: str) -> bool:
        return await self.results.is_result_ready(task_id)


class Environment:
    """The tasks of one broker, a worker for them, and what they have written down."""

    def __init__(self, setting: Setting, home: Home) -> None:
        self.setting = setting
        self.folder = Path(setting.folder)
        self._loop = asyncio.Runner()
        self.shop = Shop(setting)
        self.run(self.shop.broker.startup())
        where = "tests.queues.taskiq_tasks:broker"
        self._worker = Daemon(
            "taskiq",
            [sys.executable, "-W", "ignore", "-m", "taskiq", "worker", where, "-w", "1", "--log-level", "INFO"],
            self.folder,
            answers=lambda: "Listening started" in self._worker.log.read_text(),
            environment={
                "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
                "ONEFOLD_TASKIQ": json.dumps(setting),
            },
        )
        # It ends with the session, whatever becomes of that.
        home.keep(self._worker)

    def run(self, work: Any) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, PATIENCE)

        return self._loop.run(bounded())

    def send(self, name: str, *args: Any, key: str) -> Any:
        return self.run(self.shop.tasks[name].kicker().with_labels(idempotency_key=key).kiq(*args))

    def nudge(self) -> bool:
        """A listener of Redis looks for abandoned messages only after a new one has come."""
        if self.setting.kind == "redis":
            self.run(self.shop.tasks["nudge"].kiq())
        return True

    def result(self, sent: Any) -> Any:
        found = self.outcome(sent)
        assert not found.is_err, found
        return found.return_value

    def outcome(self, sent: Any) -> Any:
        """The result of a message, or its error, once it is there."""
        self.until(lambda: self.nudge() and self.run(sent.is_ready()), every=0.1)
        return self.run(sent.get_result())

    def again(self, sent: Any, name: str, *args: Any, key: str) -> Any:
        """The same message once more."""
        kicker = self.shop.tasks[name].kicker().with_task_id(sent.task_id).with_labels(idempotency_key=key)
        return self.run(kicker.kiq(*args))

    def close(self) -> None:
        self._worker.kill()
        self.run(self.shop.broker.shutdown())
        self.run(self.shop.guard.aclose())
        self._loop.close()
        self.shop.guard_sync.close()
        self.shop.wallet.close()

    def open_gate(self, name: str) -> None:
        (self.folder / name).touch()

    def times(self, *noted: str) -> int:
        """How often something was written down that begins with these words."""
        begin = " ".join(noted)
        return sum(f"{line} ".startswith(f"{begin} ") for line in self.shop.notes.read())

    def until(self, holds: Callable[[], Any], every: float = 0.02) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self._worker.log.read_text()[-4000:]
            time.sleep(every)

    def until_noted(self, *noted: str, times: int = 1) -> None:
        self.until(lambda: self.nudge() and self.times(*noted) >= times, every=0.05)
