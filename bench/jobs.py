"""What a guarded job costs, against the bare framework: python -m bench.jobs (--only rq)

A no-op function and the memory store, so that nothing but the adapter is measured. Both sides take turns in one process
and on one server, a round of messages each; the ratio is that of their medians, and of their calls of Python functions,
counted apart. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import gc
import logging
import secrets
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple

from onefold import AsyncGuard, Guard
from services.house import House

ROUNDS: Final = 15
MESSAGES: Final = 400

# Far more than a round takes.
SECONDS_MAX: Final = 120.0

# The bar of an adapter: at most so much over the bare framework.
AT_MOST: Final = 1.25


class Side(NamedTuple):
    """Puts messages there, which is not measured, and consumes as many."""

    fill: Callable[[int], None]
    consume: Callable[[int], None]


class Sides(NamedTuple):
    bare: Side
    guarded: Side


@contextmanager
def dramatiq_redis(house: House) -> Iterator[Sides]:
    from dramatiq.brokers.redis import RedisBroker

    url = house["redis"].url
    with _dramatiq(lambda name: RedisBroker(url=url, namespace=name)) as sides:
        yield sides


@contextmanager
def dramatiq_rabbitmq(house: House) -> Iterator[Sides]:
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    url = house["rabbitmq"].url
    with _dramatiq(lambda _: RabbitmqBroker(url=url)) as sides:
        yield sides


@contextmanager
def _dramatiq(broker_of: Callable[[str], Any]) -> Iterator[Sides]:
    """Both actors on one broker, each with its queue, under Dramatiq's own worker with one thread."""
    import dramatiq

    from onefold.queues.dramatiq import guarded

    logging.getLogger("dramatiq").setLevel(logging.CRITICAL)
    name = f"bench-{secrets.token_hex(4)}"
    broker, guard, done = broker_of(name), Guard("memory:"), Countdown()

    def handle(number: int) -> None:  # noqa: ARG001 - it does nothing
        done.count()

    actors: list[Any] = [
        dramatiq.actor(broker=broker, queue_name=f"{name}-bare", actor_name="bare")(handle),
        guarded(guard, "bench", broker=broker, queue_name=f"{name}-guarded", actor_name="guarded")(handle),
    ]

    def side(actor: Any) -> Side:
        def fill(number: int) -> None:
            for at in range(number):
                actor.send_with_options(args=(at,), idempotency_key=secrets.token_hex(8))

        def consume(number: int) -> None:
            done.expect(number)
            before = list(broker.middleware)
            worker = dramatiq.Worker(broker, queues={actor.queue_name}, worker_threads=1, worker_timeout=100)
            worker.start()
            done.wait()
            with unmeasured():
                worker.stop()
                # Each worker adds its own, and leaves it there.
                broker.middleware[:] = before

        return Side(fill, consume)

    try:
        yield Sides(*map(side, actors))
    finally:
        guard.close()
        broker.close()


class Countdown:
    """Says when so many messages were handled."""

    def __init__(self) -> None:
        self._left = 0
        self._over = threading.Event()

    def expect(self, number: int) -> None:
        self._left = number
        self._over.clear()

    def count(self) -> None:
        self._left -= 1
        if not self._left:
            self._over.set()

    def wait(self) -> None:
        assert self._over.wait(SECONDS_MAX), "not all messages have come"


class Watch:
    """The time that passed, and that of the processor in this process, without what is not to be measured."""

    def __init__(self) -> None:
        self.excluded = (0.0, 0.0)

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.excluded[0], time.process_time() - self.excluded[1]


WATCH: Final = Watch()


@contextmanager
def unmeasured() -> Iterator[None]:
    """Leave this out of the times, and out of the counts."""
    profile, passed, busy = sys.getprofile(), time.perf_counter(), time.process_time()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profile)
        before = WATCH.excluded
        WATCH.excluded = (before[0] + time.perf_counter() - passed, before[1] + time.process_time() - busy)


@contextmanager
def rq_simple(house: House) -> Iterator[Sides]:
    """Both functions under a SimpleWorker; the fork of another worker would cost both far more than the guard."""
    from redis import Redis
    from rq import Queue, SimpleWorker

    from onefold.queues.rq import guarded, send

    logging.getLogger("rq").setLevel(logging.CRITICAL)
    space = ModuleType("onefold_bench_jobs")
    sys.modules[space.__name__] = space
    guard, connection = Guard("memory:"), Redis.from_url(house["redis"].url)
    name = f"bench-{secrets.token_hex(4)}"

    def bare(number: int) -> None: ...

    def ours(number: int) -> None: ...

    functions: list[Any] = [bare, guarded(guard, "bench")(ours)]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}

    def side(function: Any) -> Side:
        setattr(space, function.__name__, function)
        jobs = Queue(f"{name}-{function.__name__}", connection=connection)
        worker = SimpleWorker([jobs], connection=connection)

        def fill(number: int) -> None:
            for at in range(number):
                send(jobs, f"{space.__name__}.{function.__name__}", (at,), result_ttl=0)

        def consume(number: int) -> None:
            for _ in range(number):
                found = worker.dequeue_job_and_maintain_ttl(None)
                assert found is not None
                worker.execute_job(*found)

        return Side(fill, consume)

    try:
        yield Sides(*map(side, functions))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        guard.close()
        connection.close()


@contextmanager
def temporal_threads(house: House) -> Iterator[Sides]:
    def bare(number: int) -> None: ...

    def ours(number: int) -> None: ...

    with closing(Guard("memory:")) as guard, _temporal(house, guard, bare, ours) as sides:
        yield sides


@contextmanager
def temporal_async(house: House) -> Iterator[Sides]:
    async def bare(number: int) -> None: ...

    async def ours(number: int) -> None: ...

    with _temporal(house, AsyncGuard("memory:"), bare, ours) as sides:
        yield sides


@contextmanager
def _temporal(house: House, guard: Guard | AsyncGuard, bare: Any, ours: Any) -> Iterator[Sides]:
    """Both activities in one worker; a workflow in the same process starts them, a hundred at a time."""
    from bench.sides.many_activities import Activities

    activities = Activities(house["temporal"].url, guard, bare, ours)
    try:
        yield Sides(*(Side(lambda _: None, partial(activities.run, name)) for name in ("bare", "ours")))
    finally:
        activities.close()


ADAPTERS: Final[dict[str, Callable[[House], Any]]] = {
    "dramatiq-redis": dramatiq_redis,
    "dramatiq-rabbitmq": dramatiq_rabbitmq,
    "rq": rq_simple,
    "temporal-threads": temporal_threads,
    "temporal-async": temporal_async,
}


def calls_of(side: Side, number: int) -> float:
    """Count the calls of Python functions for each message, in all threads that the round starts."""
    counted = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal counted
        counted += event == "call"

    side.fill(number)
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        side.consume(number)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted / number


def seconds_of(side: Side) -> tuple[float, float]:
    """Measure one round, for each message."""
    side.fill(MESSAGES)
    gc.collect()
    start = WATCH.read()
    side.consume(MESSAGES)
    end = WATCH.read()
    return (end[0] - start[0]) / MESSAGES, (end[1] - start[1]) / MESSAGES


def compare(name: str, sides: Sides, rounds: int) -> None:
    for side in sides:
        side.fill(20)
        side.consume(20)
    calls = [calls_of(side, 200) for side in sides]
    measured: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds):
        for at in (0, 1) if number % 2 else (1, 0):
            measured[at].append(seconds_of(sides[at]))
    for which, title in enumerate(("passed", "of the processor")):
        bare, guarded = (statistics.median(one[which] for one in side) for side in measured)
        print(f"{name:18} {bare * 1e6:6.0f} µs bare, {guarded * 1e6:6.0f} µs guarded ({title}): {guarded / bare:.2f}")
    print(f"{name:18} {calls[0]:6.0f} calls bare, {calls[1]:6.0f} guarded. At most {AT_MOST} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=ADAPTERS, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with closing(House()) as house:
        for name in options.only or ADAPTERS:
            with ADAPTERS[name](house) as sides:
                compare(name, sides, options.rounds)


if __name__ == "__main__":
    main()
