"""NATS JetStream: the limits of a stream and the settings of a consumer, through nats-py.

`queue` is the name of the stream, or `STREAM/consumer`. Nothing is created, and no message is read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onefold.config.wording import spelled
from onefold.health.report import Check, counted, green, red, yellow
from onefold.lint.brokers.answers import BROKER, Answer, Silent
from onefold.lint.settings.found import Found


def ask(url: str, queue: str, timeout: float) -> Answer:
    import nats.errors

    # In a thread of its own: the caller may be inside an event loop.
    with ThreadPoolExecutor(1) as thread:
        try:
            stream, consumer = thread.submit(asyncio.run, _told(url, queue, within=timeout)).result()
        except (nats.errors.Error, OSError, TimeoutError, ValueError) as error:
            raise Silent(f"NATS does not tell the settings of {queue}: {type(error).__name__}") from None
    checks = [_exists(queue, stream, consumer), _window(stream.config)]
    if consumer is not None:
        checks += _of_consumer(stream.config.name, consumer)
    return Answer(list(_found(stream.config, consumer)), checks)


async def _told(url: str, queue: str, *, within: float) -> tuple[Any, Any]:
    import nats

    async def quiet(_error: Exception) -> None:
        """The report says in one line what the client would log."""

    name, _, consumer = queue.partition("/")
    client = await nats.connect(url, connect_timeout=within, allow_reconnect=False, error_cb=quiet)
    try:
        js = client.jetstream(timeout=within)
        return await js.stream_info(name), await js.consumer_info(name, consumer) if consumer else None
    finally:
        await client.close()


def _exists(queue: str, stream: Any, consumer: Any) -> Check:
    waiting = f", {consumer.num_pending} of them for this consumer" if consumer is not None else ""
    return green("queue", f"{queue} has {counted(stream.state.messages, 'message')}{waiting}")


def _window(config: Any) -> Check:
    window = config.duplicate_window or 0.0
    return green(
        "window",
        f"the stream drops what is published twice within {spelled(window)}; duplicates that come later, and every "
        "redelivery, are left to the guard",
    )


def _of_consumer(stream: str, consumer: Any) -> Iterator[Check]:
    config = consumer.config
    policy = getattr(config.ack_policy, "value", config.ack_policy)
    if policy != "explicit":
        yield red(
            "acknowledgements",
            f"the consumer {consumer.name} has ack_policy {policy}: a message is settled before it is handled",
            "Create a consumer with ack_policy explicit",
        )
    if (config.max_deliver or -1) > 0:
        advisory = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.{consumer.name}"
        yield yellow(
            "max_deliver",
            f"a message that has used up its {config.max_deliver} deliveries stays in the stream, and nobody gets it: "
            "that is what becomes of one whose worker is killed on its last delivery",
            f"Leave max_deliver out (attempts= bounds what fails), or listen to {advisory}",
        )


def _found(config: Any, consumer: Any) -> Iterator[Found]:
    age = config.max_age or math.inf
    name = f"max_age of {config.name}" if math.isfinite(age) else f"no max_age of {config.name}"
    yield Found(name, "replays" if math.isfinite(age) else "shown", age, BROKER, None)
    if consumer is not None and consumer.config.ack_wait:
        # A guarded worker keeps its messages in progress: a handler may take longer.
        yield Found("ack_wait", "shown", consumer.config.ack_wait, BROKER, None)
