"""What a guarded consumer costs, against the loop of the bare client: python -m bench.queues (--only nats-push)

A no-op handler and the memory store: nothing but the adapter is measured. Both sides take turns in one process on one
server, a round of messages each, and the ratio is that of their medians, in processor time of this process: whatever
else the machine does meanwhile is not in it. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import secrets
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

from services.house import House
from services.programs import Missing

ROUNDS: Final = 15
MESSAGES: Final = 1_000

# The bar of an adapter: at most so much over the bare client.
AT_MOST: Final = 1.25

# Far more than a round takes.
SECONDS_MAX: Final = 120.0


class Sides(NamedTuple):
    """Two consumers of as many messages: the bare client's loop, and the guarded one. Each is awaited to its end."""

    bare: Callable[[int], Awaitable[None]]
    guarded: Callable[[int], Awaitable[None]]
    # Puts messages there, which is not measured; says whose.
    fill: Callable[[str, int], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


class Counted:
    """A handler that does nothing but count, and says when all are there."""

    def __init__(self) -> None:
        self._left = 0
        self._all = asyncio.Event()

    async def __call__(self, _message: object) -> None:
        self._left -= 1
        if not self._left:
            self._all.set()

    def expect(self, number: int) -> None:
        self._left = number
        self._all.clear()

    async def all_there(self) -> None:
        await asyncio.wait_for(self._all.wait(), SECONDS_MAX)


async def nats_push(house: House) -> Sides:
    return await _nats(house, _push)


async def nats_pull(house: House) -> Sides:
    return await _nats(house, _pull)


async def _nats(house: House, subscribe: Callable[..., Any]) -> Sides:
    import nats

    from onefold import AsyncGuard
    from onefold.queues.keys import header
    from onefold.queues.nats import guarded

    client = await nats.connect(house["nats"].url)
    js = client.jetstream()
    name = f"bench-{secrets.token_hex(4)}"
    guard = AsyncGuard("memory:")
    for side in ("bare", "guarded"):
        await js.add_stream(name=f"{name}-{side}", subjects=[f"{name}.{side}"], storage="memory")
    handler = Counted()
    bare, ours = await subscribe(js, name, handler, guarded(guard, "bench", handler, key=header(), dead_letter="dead"))

    async def fill(side: str, number: int) -> None:
        waiting = [
            await js.publish_async(f"{name}.{side}", b"{}", headers={"idempotency-key": secrets.token_hex(8)})
            for _ in range(number)
        ]
        await asyncio.gather(*waiting)
        # The server has the acknowledgements of the round before.
        await client.flush()

    def consumed(consume: Callable[[], Awaitable[None]]) -> Callable[[int], Awaitable[None]]:
        async def round_of(number: int) -> None:
            handler.expect(number)
            await consume()
            await handler.all_there()
            await client.flush()

        return round_of

    async def close() -> None:
        for side in ("bare", "guarded"):
            await js.delete_stream(f"{name}-{side}")
        await client.close()
        await guard.aclose()

    return Sides(consumed(bare), consumed(ours), fill, close)


async def _push(js: Any, name: str, handler: Counted, callback: Any) -> Any:
    """Subscriptions that begin with the round, to messages that are there."""

    async def bare(message: Any) -> None:
        await handler(message)
        await message.ack()

    async def once(side: str, cb: Any) -> None:
        subscription = await js.subscribe(f"{name}.{side}", durable=f"push-{side}", cb=cb, manual_ack=True)
        await handler.all_there()
        await subscription.unsubscribe()

    return lambda: once("bare", bare), lambda: once("guarded", callback)


async def _pull(js: Any, name: str, handler: Counted, callback: Any) -> Any:
    plain = await js.pull_subscribe(f"{name}.bare", durable="pull")
    ours = await js.pull_subscribe(f"{name}.guarded", durable="pull")

    async def bare() -> None:
        while handler._left:
            for message in await plain.fetch(100):
                await handler(message)
                await message.ack()

    async def guarded() -> None:
        consuming = asyncio.create_task(callback.consume(ours, batch=200))
        await handler.all_there()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)

    return bare, guarded


async def redis_streams(house: House) -> Sides:
    """Against a loop that acknowledges each entry by itself, as most do."""
    return await Streams(house["redis"].url, acks_at_once=1).sides()


async def redis_streams_batched(house: House) -> Sides:
    """Against one that acknowledges all that it has read at once, as the guarded worker does."""
    return await Streams(house["redis"].url, acks_at_once=BATCH).sides()


async def redis_streams_sync(house: House) -> Sides:
    return await SyncStreams(house["redis"].url, acks_at_once=1).sides()


# Read by both sides at a time.
BATCH: Final = 100


class Streams:
    """Two streams of Redis, the bare loop on one of them, and a guarded worker on the other."""

    def __init__(self, url: str, *, acks_at_once: int) -> None:
        import redis.asyncio

        from onefold.queues.keys import header

        self.name = f"bench-{secrets.token_hex(4)}"
        self.bare_stream = f"{self.name}-bare"
        self.acks_at_once = acks_at_once
        self.client, self.blocking = redis.asyncio.Redis.from_url(url), redis.Redis.from_url(url)
        self.left = 0
        self.worker: Any = None
        names = {"stream": f"{self.name}-guarded", "group": "bench", "dead_letter": f"{self.name}-dead"}
        self.options: dict[str, Any] = {"key": header(), **names}

    async def sides(self) -> Sides:
        for side in ("bare", "guarded"):
            self.blocking.xgroup_create(f"{self.name}-{side}", "bench", "0", mkstream=True)
        self.open()
        return Sides(self.bare, self.guarded, self.fill, self.close)

    def open(self) -> None:
        from onefold import AsyncGuard

        self.guard: Any = AsyncGuard("memory:")

    def handled(self) -> None:
        self.left -= 1
        if not self.left and self.worker is not None:
            self.worker.stop()

    async def handle(self, _message: object) -> None:
        self.handled()

    async def fill(self, side: str, number: int) -> None:
        self.left = number
        pipeline = self.blocking.pipeline()
        for _ in range(number):
            pipeline.xadd(f"{self.name}-{side}", {"idempotency-key": secrets.token_hex(8), "body": b"{}"})
        pipeline.execute()

    async def bare(self, _number: int) -> None:
        done: list[bytes] = []
        while self.left:
            found = await self.client.xreadgroup("bench", "bare", {self.bare_stream: ">"}, count=BATCH, block=1000)
            for entry_id, fields in _entries(found):
                await self.handle(fields)
                done.append(entry_id)
                if len(done) >= self.acks_at_once or not self.left:
                    await self.client.xack(self.bare_stream, "bench", *done)
                    done.clear()

    async def guarded(self, _number: int) -> None:
        from onefold.queues.redis_streams import guarded

        self.worker = guarded(self.guard, "bench", self.handle, **self.options)
        await self.worker.consume(self.client, batch=BATCH)
        self.worker = None

    async def close(self) -> None:
        self.blocking.delete(self.bare_stream, f"{self.name}-guarded")
        self.blocking.close()
        await self.client.aclose()
        await self.guard.aclose()


class SyncStreams(Streams):
    """The same with the blocking client."""

    def open(self) -> None:
        from onefold import Guard

        self.guard = Guard("memory:")

    def handle_sync(self, _message: object) -> None:
        self.handled()

    async def bare(self, _number: int) -> None:
        while self.left:
            found = self.blocking.xreadgroup("bench", "bare", {self.bare_stream: ">"}, count=BATCH, block=1000)
            for entry_id, fields in _entries(found):
                self.handle_sync(fields)
                self.blocking.xack(self.bare_stream, "bench", entry_id)

    async def guarded(self, _number: int) -> None:
        from onefold.queues.redis_streams import guarded

        self.worker = guarded(self.guard, "bench", self.handle_sync, **self.options)
        self.worker.consume(self.blocking, batch=BATCH)
        self.worker = None

    async def close(self) -> None:
        self.blocking.delete(self.bare_stream, f"{self.name}-guarded")
        self.blocking.close()
        await self.client.aclose()
        self.guard.close()


def _entries(found: Any) -> Any:
    """The entries of a reply to XREADGROUP, in either of redis-py's forms."""
    if not found:
        return []
    return next(iter(found.values())) if isinstance(found, dict) else found[0][1]


class Taken:
    """The same for threads."""

    def __init__(self) -> None:
        self.left = 0
        self.all = threading.Event()

    def __call__(self, _message: object) -> None:
        self.left -= 1
        if not self.left:
            self.all.set()

    async def in_task(self, message: object) -> None:
        self(message)

    def expect(self, number: int) -> None:
        self.left = number
        self.all.clear()


async def sqs_threads(house: House) -> Sides:
    from onefold import Guard
    from onefold.queues.keys import header
    from onefold.queues.sqs import guarded

    client, queues, options = _sqs(house)
    guard, handler = Guard("memory:"), Taken()

    def bare() -> None:
        while handler.left:
            found = client.receive_message(QueueUrl=queues["bare"], **options).get("Messages", [])
            for message in found:
                handler(message)
            entries = [{"Id": str(at), "ReceiptHandle": one["ReceiptHandle"]} for at, one in enumerate(found)]
            client.delete_message_batch(QueueUrl=queues["bare"], Entries=entries)

    def ours() -> None:
        asked: Any = {"client": client, "queue": queues["guarded"], "key": header(), "dead_letter": queues["dead"]}
        worker = guarded(guard, "bench", handler, **asked)
        consuming = threading.Thread(target=worker.consume, daemon=True)
        consuming.start()
        handler.all.wait(SECONDS_MAX)
        worker.drain()

    async def close() -> None:
        _delete(client, queues)
        guard.close()

    return Sides(_once(handler, bare), _once(handler, ours), _filling(client, queues), close)


async def sqs_tasks(house: House) -> Sides:
    from aiobotocore.session import get_session

    from onefold import AsyncGuard
    from onefold.queues.keys import header
    from onefold.queues.sqs import guarded_async

    sync_client, queues, options = _sqs(house)
    entered = get_session().create_client("sqs", **_at(house))
    client = await entered.__aenter__()
    guard, handler = AsyncGuard("memory:"), Taken()

    async def bare(number: int) -> None:
        handler.expect(number)
        while handler.left:
            found = (await client.receive_message(QueueUrl=queues["bare"], **options)).get("Messages", [])
            for message in found:
                await handler.in_task(message)
            entries = [{"Id": str(at), "ReceiptHandle": one["ReceiptHandle"]} for at, one in enumerate(found)]
            await client.delete_message_batch(QueueUrl=queues["bare"], Entries=entries)

    async def ours(number: int) -> None:
        handler.expect(number)
        asked: Any = {"client": client, "queue": queues["guarded"], "key": header(), "dead_letter": queues["dead"]}
        worker = guarded_async(guard, "bench", handler.in_task, **asked)
        consuming = asyncio.create_task(worker.consume())
        await asyncio.to_thread(handler.all.wait, SECONDS_MAX)
        await worker.drain()
        await consuming

    async def close() -> None:
        await entered.__aexit__(None, None, None)
        _delete(sync_client, queues)
        await guard.aclose()

    return Sides(bare, ours, _filling(sync_client, queues), close)


def _at(house: House) -> dict[str, Any]:
    from services.dynamodb import CREDENTIALS, REGION

    login = {name.lower(): value for name, value in CREDENTIALS.items()}
    return {"endpoint_url": house["dynamodb"].url, "region_name": REGION, **login}


def _sqs(house: House) -> tuple[Any, dict[str, str], dict[str, Any]]:
    import boto3

    from onefold.queues._sqs import requests

    # A worker that stops waits for its last receive.
    requests.RECEIVE_SECONDS = 1  # type: ignore[misc]
    client: Any = boto3.client("sqs", **_at(house))
    name = f"bench-{secrets.token_hex(4)}"
    queues = {side: client.create_queue(QueueName=f"{name}-{side}")["QueueUrl"] for side in ("bare", "guarded", "dead")}
    # The bare client asks for the same: whoever reads a key needs the attributes, and whoever counts the receives.
    options = {
        "MaxNumberOfMessages": 10,
        "WaitTimeSeconds": 1,
        "VisibilityTimeout": 30,
        "AttributeNames": [*requests.SYSTEM_ATTRIBUTES],
        "MessageAttributeNames": ["All"],
    }
    return client, queues, options


def _once(handler: Taken, consume: Callable[[], None]) -> Callable[[int], Awaitable[None]]:
    async def round_of(number: int) -> None:
        handler.expect(number)
        await asyncio.to_thread(consume)

    return round_of


def _filling(client: Any, queues: dict[str, str]) -> Callable[[str, int], Awaitable[None]]:
    async def fill(side: str, number: int) -> None:
        for start in range(0, number, 10):
            entries = [
                {
                    "Id": str(at),
                    "MessageBody": "{}",
                    "MessageAttributes": {
                        "idempotency-key": {"DataType": "String", "StringValue": secrets.token_hex(8)}
                    },
                }
                for at in range(min(10, number - start))
            ]
            client.send_message_batch(QueueUrl=queues[side], Entries=entries)

    return fill


def _delete(client: Any, queues: dict[str, str]) -> None:
    for queue in queues.values():
        client.delete_queue(QueueUrl=queue)
    client.close()


ADAPTERS: Final[dict[str, Callable[[House], Awaitable[Sides]]]] = {
    "nats-push": nats_push,
    "nats-pull": nats_pull,
    "redis-streams": redis_streams,
    "redis-streams-batched": redis_streams_batched,
    "redis-streams-sync": redis_streams_sync,
    "sqs-threads": sqs_threads,
    "sqs-tasks": sqs_tasks,
}


async def measure(sides: Sides, rounds: int, messages: int) -> tuple[list[float], list[float]]:
    """Return the seconds of processor time of each round, for the bare side and for the guarded one."""
    taken: dict[str, list[float]] = {"bare": [], "guarded": []}
    for number in range(rounds + 2):
        for side in ("bare", "guarded") if number % 2 else ("guarded", "bare"):
            await sides.fill(side, messages)
            gc.collect()
            began = time.process_time()
            await (sides.bare if side == "bare" else sides.guarded)(messages)
            # The first ones are a warm-up.
            if number > 1:
                taken[side].append(time.process_time() - began)
    return taken["bare"], taken["guarded"]


async def compare(house: House, name: str, rounds: int, messages: int) -> str:
    sides = await ADAPTERS[name](house)
    try:
        bare, guarded = (statistics.median(one) / messages for one in await measure(sides, rounds, messages))
    finally:
        await sides.close()
    ratio = guarded / bare
    verdict = "met" if ratio <= AT_MOST else "missed"
    shown = f"{name:<12} bare {bare * 1e6:6.1f} us, guarded {guarded * 1e6:6.1f} us a message: {ratio:.2f}"
    return f"{shown} ({verdict}: at most {AT_MOST})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.queues", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=sorted(ADAPTERS), help="one adapter; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    asked = parser.parse_args(arguments)
    with closing(House()) as house:
        for name in asked.only or ADAPTERS:
            try:
                print(asyncio.run(compare(house, name, asked.rounds, asked.messages)), flush=True)
            except Missing as missing:
                print(f"{name:<12} {missing}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
