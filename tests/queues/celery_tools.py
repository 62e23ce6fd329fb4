"""Real Celery workers as processes, and messages that are sent a second time exactly as they were."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery, signals
from redis import Redis

from services.home import Home
from services.processes import Daemon
from tests.processes import Notes
from tests.queues.celery_tasks import Setting, made
from tests.support import PATIENCE, PROJECT

# Where kombu notes since when each message is in a worker's hands.
UNACKED = "unacked_index"


class Environment:
    """An app, one worker for it, and what its tasks have written down."""

    def __init__(self, setting: Setting, home: Home) -> None:
        self.setting = setting
        self.app: Celery = made(setting)
        self.folder = Path(setting.folder)
        self.notes = Notes(self.folder / "notes")
        self._starts = 1
        options = ["-P", setting.pool, "-c", "4", "--without-gossip", "--without-mingle", "-l", "INFO"]
        self._worker = Daemon(
            "celery",
            [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tests.queues.celery_tasks", "worker", *options],
            self.folder,
            answers=lambda: self._worker.log.read_text().count(" ready.") >= self._starts,
            environment={
                "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
                "ONEFOLD_CELERY": json.dumps(setting),
            },
        )
        # It ends with the session, whatever becomes of that.
        home.keep(self._worker)

    def __getattr__(self, name: str) -> Any:
        return self.app.tasks[f"shop.{name}"]

    def kill(self) -> None:
        """SIGKILL to the worker and all of its children."""
        self._worker.kill()

    def give_back(self) -> None:
        """After a kill: the time is over for which Redis keeps a message from others. RabbitMQ does it by itself."""
        if self.setting.broker.startswith("redis"):
            with closing(Redis.from_url(self.setting.broker)) as redis:
                taken: Any = redis.zrange(UNACKED, 0, -1)
                redis.zadd(UNACKED, dict.fromkeys(taken, 1.0))

    def start(self) -> None:
        """Once more, after a kill."""
        self._starts += 1
        self._worker.start()

    def close(self) -> None:
        self.kill()
        self.app.close()

    def open_gate(self, name: str) -> None:
        (self.folder / name).touch()

    def noted(self, *noted: str) -> list[str]:
        """What was written down and begins with these words."""
        begin = " ".join(noted)
        return [line for line in self.notes.read() if f"{line} ".startswith(f"{begin} ")]

    def times(self, *noted: str) -> int:
        return len(self.noted(*noted))

    def until(self, holds: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self._worker.log.read_text()[-4000:]
            time.sleep(0.02)

    def until_noted(self, *noted: str, times: int = 1) -> None:
        self.until(lambda: self.times(*noted) >= times)


class Sent:
    """What was published, to be published again."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.messages: list[dict[str, Any]] = []

    def note(self, body: Any, exchange: Any, routing_key: str, headers: Any, properties: Any, **_: Any) -> None:
        message = {"exchange": exchange, "routing_key": routing_key, "headers": dict(headers), **properties}
        self.messages.append({"body": json.loads(json.dumps(body)), **message})

    def again(self, at: int = 0) -> None:
        """The same message once more, as a broker delivers it."""
        with self._app.producer_or_acquire() as producer:
            producer.publish(**self.messages[at], serializer="json")


@contextmanager
def sending(environment: Environment) -> Iterator[Sent]:
    """Every message that is published inside."""
    sent = Sent(environment.app)
    signals.before_task_publish.connect(sent.note, weak=False)
    try:
        yield sent
    finally:
        signals.before_task_publish.disconnect(sent.note)
