"""What a guarded task or handler costs, against the bare framework: python -m bench.async_jobs (--only taskiq)

As `bench.jobs` does it, for frameworks that are async: a no-op function and the memory store, both sides in turns.
taskiq's receiver takes one message after the other; FastStream consumes with its own loop, one worker.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

from bench.jobs import ROUNDS, SECONDS_MAX, Side, Sides, compare, unmeasured
from onefold import AsyncGuard
from services.house import House


@contextmanager
def taskiq_redis(house: House) -> Iterator[Sides]:
    """Both tasks on Redis streams, each with its queue."""
    from taskiq.receiver import Receiver
    from taskiq_redis import RedisStreamBroker

    from onefold.queues.taskiq import guarded

    logging.getLogger("taskiq").setLevel(logging.CRITICAL)
    guard, ends = AsyncGuard("memory:"), list[Any]()

    async def handle(number: int) -> None: ...

    def side(loop: asyncio.Runner, name: str) -> Side:
        broker = RedisStreamBroker(house["redis"].url, queue_name=f"bench-{secrets.token_hex(4)}", xread_block=100)
        made: Any = guarded(guard, "bench", broker=broker, task_name=name) if name == "guarded" else broker.task(name)
        task = made(handle)
        loop.run(broker.startup())
        ends.append(broker.shutdown)
        receiver, messages = Receiver(broker, max_async_tasks=1), broker.listen()

        async def sent(number: int) -> None:
            for at in range(number):
                await task.kicker().with_labels(idempotency_key=secrets.token_hex(8)).kiq(at)

        async def taken(number: int) -> None:
            for _ in range(number):
                # Each in a task of its own, as a worker does it.
                await asyncio.create_task(receiver.callback(await anext(messages)))

        return Side(lambda number: loop.run(sent(number)), lambda number: loop.run(taken(number)))

    with asyncio.Runner() as loop:
        yield Sides(side(loop, "bare"), side(loop, "guarded"))
        for end in ends:
            loop.run(end())
        loop.run(guard.aclose())


@contextmanager
def faststream_rabbitmq(house: House) -> Iterator[Sides]:
    from faststream.rabbit import RabbitBroker

    url = house["rabbitmq"].url
    with _faststream(lambda: RabbitBroker(url, logger=None), lambda broker, name: broker.subscriber(name)) as sides:
        yield sides


@contextmanager
def faststream_nats(house: House) -> Iterator[Sides]:
    from faststream.nats import JStream, NatsBroker, PullSub

    def subscribed(broker: Any, name: str) -> Any:
        return broker.subscriber(name, stream=JStream(name, subjects=[name]), durable="bench", pull_sub=PullSub())

    url = house["nats"].url
    with _faststream(lambda: NatsBroker(url, logger=None), subscribed) as sides:
        yield sides


@contextmanager
def _faststream(broker_of: Callable[[], Any], subscribed: Callable[[Any, str], Any]) -> Iterator[Sides]:
    """Both handlers, each with its queue, and a broker of its own for each round."""
    from onefold.queues.faststream import guarded
    from onefold.queues.keys import header

    guard = AsyncGuard("memory:")

    def side(loop: asyncio.Runner, is_guarded: bool) -> Side:  # noqa: FBT001 - one of two
        name, left = f"bench-{secrets.token_hex(4)}", [0]
        over = asyncio.Event()

        async def handle(number: int) -> None:  # noqa: ARG001 - it does nothing
            left[0] -= 1
            if not left[0]:
                over.set()

        def made() -> Any:
            broker = broker_of()
            subscribed(broker, name)(guarded(guard, "bench", key=header())(handle) if is_guarded else handle)
            return broker

        async def sent(number: int) -> None:
            broker = made()
            # Its queue, or its stream, has to exist before anything is published.
            await broker.start()
            await broker.subscribers[0].stop()
            for at in range(number):
                await broker.publish(at, name, headers={"idempotency-key": secrets.token_hex(8)})
            await broker.stop()

        async def taken(number: int) -> None:
            left[0] = number
            over.clear()
            broker = made()
            await broker.start()
            await asyncio.wait_for(over.wait(), SECONDS_MAX)
            with unmeasured():
                await broker.stop()

        return Side(lambda number: loop.run(sent(number)), lambda number: loop.run(taken(number)))

    with asyncio.Runner() as loop:
        yield Sides(side(loop, is_guarded=False), side(loop, is_guarded=True))
        loop.run(guard.aclose())


ADAPTERS: Final[dict[str, Callable[[House], Any]]] = {
    "taskiq-redis": taskiq_redis,
    "faststream-rabbitmq": faststream_rabbitmq,
    "faststream-nats": faststream_nats,
}


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
