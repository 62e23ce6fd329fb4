"""The five places where duplicates arise, each with its own processes, and their outcome.

The five messages of the wallet go through one place each. Whether an effect happened is read from the wallet's file
when all processes are gone; no process is asked how often it did something.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from onefold.demo.consumers import Desk
from onefold.demo.queue import Fault
from onefold.demo.stage import Actor, Event, Stage
from onefold.demo.wallet import MESSAGES, Counted, Message, count, each_once

HANDLERS: Final = "onefold.demo.consumers"


class Side(NamedTuple):
    """One side of the demo: `handler` names a function that creates its consumer, as in `consumers`."""

    name: str
    handler: str
    desk: Desk = Desk("", "")


class Scene:
    """One place on one side: its processes, and their reports."""

    def __init__(self, stage: Stage, side: Side, message: Message) -> None:
        self.message = message
        self.events: list[Event] = []
        self._stage = stage
        self._side = side

    def broker(self, log: str = "leader", **plan: Any) -> tuple[Actor, int]:
        """Start a broker; return it, once it is ready, and its port."""
        broker = self._start("broker", log=self.file(log), **plan)
        return broker, int(broker.expect("ready").text)

    def send(self, port: int, *, impatient: bool = False) -> None:
        """Run a producer that does not end before it has an ack."""
        self._start("producer", port=port, message=self.message, impatient=impatient).finish()

    def consumer(self, port: int, fault: str = "none") -> Actor:
        desk = self._side.desk
        wallet = str(wallet_of(self._stage, self._side))
        plan = {"wallet": wallet, "handler": self._side.handler, "store": desk.store, "scope": desk.scope}
        return self._start("consumer", port=port, fault=fault, **plan)

    def kill(self, actor: Actor, text: str) -> None:
        self.events.append(Event(time.time(), "demo", os.getpid(), "killed", f"{text} {actor.pid}"))
        actor.kill()

    def file(self, name: str) -> str:
        return str(self._stage.folder / f"{self._side.name}-{self.message.key}-{name}.db")

    def _start(self, role: str, **plan: Any) -> Actor:
        return self._stage.start(role, plan, self.events.append)


def application_retries(scene: Scene) -> None:
    """Answer late: the broker stores the message, but the application has given up by then, and sends it again."""
    broker, port = scene.broker(fault=Fault.LATE)
    scene.send(port, impatient=True)
    scene.consumer(port).finish()
    broker.kill()


def ack_is_lost(scene: Scene) -> None:
    """Lose the ack: the broker stores the message, and the connection ends before; the producer resends."""
    broker, port = scene.broker(fault=Fault.CUT)
    scene.send(port)
    scene.consumer(port).finish()
    broker.kill()


def broker_fails_over(scene: Scene) -> None:
    """Kill the leader after the message was handled and acknowledged; the replica has the log, but not that ack."""
    leader, port = scene.broker("leader", replica=scene.file("replica"))
    scene.send(port)
    scene.consumer(port).finish()
    scene.kill(leader, "kills (SIGKILL) the leading broker")
    replica, port = scene.broker("replica")
    scene.consumer(port).finish()
    replica.kill()


def consumer_is_killed(scene: Scene) -> None:
    """Kill the consumer after it has committed the effect, and before its ack; the message goes to another one."""
    broker, port = scene.broker()
    scene.send(port)
    first = scene.consumer(port, fault="die")
    first.expect("doomed")
    scene.kill(first, "kills (SIGKILL) consumer")
    broker.expect("returned")
    scene.consumer(port).finish()
    broker.kill()


def reply_is_lost(scene: Scene) -> None:
    """Lose the reply: the database commits, but the consumer gets an error, and tries again."""
    broker, port = scene.broker()
    scene.send(port)
    scene.consumer(port, fault="lose-reply").finish()
    broker.kill()


class FailurePoint(NamedTuple):
    number: int
    name: str
    message: Message
    play: Callable[[Scene], None]


FAILURE_POINTS: Final = (
    FailurePoint(1, "the application retries after a timeout", MESSAGES[0], application_retries),
    FailurePoint(2, "the producer's ack is lost, and it resends", MESSAGES[1], ack_is_lost),
    FailurePoint(3, "the broker fails over, and replays its log", MESSAGES[2], broker_fails_over),
    FailurePoint(4, "the consumer is killed after the effect, before the ack", MESSAGES[3], consumer_is_killed),
    FailurePoint(5, "the database's reply is lost, and the consumer retries", MESSAGES[4], reply_is_lost),
)

# The place whose timeline is shown.
CRASH: Final = FAILURE_POINTS[3]


class Told(NamedTuple):
    """The content of the files of one side, and the reports of its processes in the crash."""

    counted: Counted
    crash: list[Event]


class Report(NamedTuple):
    """Both sides, and whether the demo has shown what it should."""

    points: Sequence[FailurePoint]
    without: Told
    guarded: Told

    def verdict(self, point: FailurePoint) -> str:
        key = point.message.key
        return verdict(self.without.counted.effects.get(key, 0), self.guarded.counted.effects.get(key, 0))

    @property
    def right_balances(self) -> dict[str, int]:
        return each_once(point.message for point in self.points)

    @property
    def balanced(self) -> bool:
        """Return whether the guarded wallet holds each message once."""
        return self.guarded.counted.balances == self.right_balances

    @property
    def holds(self) -> bool:
        return self.balanced and all(self.verdict(point) == ONCE for point in self.points)


ONCE: Final = "once"


def verdict(without: int, guarded: int) -> str:
    """Return a verdict: `once`, or what is wrong."""
    if guarded == 0:
        return "LOST with the guard"
    if guarded > 1:
        return f"{guarded} TIMES with the guard"
    return ONCE if without > 1 else "shows nothing: no duplicate without the guard"


def play(
    stage: Stage,
    sides: tuple[Side, Side],
    progress: Callable[[int], None],
    points: Sequence[FailurePoint] = FAILURE_POINTS,
) -> Report:
    """Play all places on both sides at once, each side with its own files. Raises `Failure` if a process fails.

    `progress` gets the number of scenes that are over, on both sides together.
    """
    over = itertools.count(1)

    def on_scene() -> None:
        progress(next(over))

    with ThreadPoolExecutor(len(sides)) as pool, stage:
        playing = [pool.submit(_play, stage, side, points, on_scene) for side in sides]
        without, guarded = (each.result() for each in playing)
    return Report(points, without, guarded)


def _play(stage: Stage, side: Side, points: Sequence[FailurePoint], on_scene: Callable[[], None]) -> Told:
    crash: list[Event] = []
    for point in points:
        scene = Scene(stage, side, point.message)
        point.play(scene)
        on_scene()
        if point is CRASH:
            crash = sorted(scene.events)
    return Told(count(wallet_of(stage, side)), crash)


def wallet_of(stage: Stage, side: Side) -> Path:
    return stage.folder / f"{side.name}-wallet.db"
