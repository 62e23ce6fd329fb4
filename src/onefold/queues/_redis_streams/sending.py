"""Send an entry until the server has it. XADD after a lost reply adds a second one, with the same key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import redis
import redis.asyncio
from msgspec import UNSET, UnsetType

from onefold import UsageError
from onefold._concurrency.generators import Flow, run, run_async
from onefold.events import tell_sent
from onefold.queues._redis_streams.consumer import BODY_FIELD, sent_fields
from onefold.queues._redis_streams.requests import ERRORS, is_temporary
from onefold.queues._shared.sends import confirmed, pauses
from onefold.queues.keys import Key, with_key

# A sender survives a restart of the server: half a minute.
SEND_TRIES: Final = 12

SYNC: Final = (redis.Redis, redis.RedisCluster)
ASYNC: Final = (redis.asyncio.Redis, redis.asyncio.RedisCluster)


def send(
    client: Any,
    stream: str,
    body: bytes,
    *,
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    body_field: str = BODY_FIELD,
) -> str:
    """Add an entry to a stream, and return its key: the one that you passed, or a new one.

    It is sent again after a lost connection, always with the same key: the stream may get it twice, and the guard finds
    the second. Raises redis-py's own error once its attempts are used up, and at once if a retry is pointless.
    """
    _check_client(client, "redis.asyncio", ASYNC)
    return run(_sending(client, stream, body, key, headers, body_field, time.sleep))


async def send_async(
    client: Any,
    stream: str,
    body: bytes,
    *,
    key: Key | UnsetType = UNSET,
    headers: Mapping[str, Any] | None = None,
    body_field: str = BODY_FIELD,
) -> str:
    """Do the same with a client of redis.asyncio."""
    _check_client(client, "redis-py without asyncio", SYNC)
    return await run_async(_sending(client, stream, body, key, headers, body_field, asyncio.sleep))


def _check_client(client: object, other: str, wrong: tuple[type, ...]) -> None:
    """Refuse a client of the other kind, and one that only collects requests: nobody would send them."""
    if hasattr(client, "command_stack"):
        raise UsageError(f"a {type(client).__name__} only collects requests: nothing was sent. Pass its client")
    if isinstance(client, wrong):
        raise UsageError(f"this is a client of {other}, which this function cannot use: nothing was sent")


def _sending(
    client: Any,
    stream: str,
    body: bytes,
    key: Key | UnsetType,
    headers: Mapping[str, Any] | None,
    body_field: str,
    sleep: Callable[[float], Any],
) -> Flow[str]:
    chosen, carried = with_key(headers, key)
    fields = sent_fields(carried, body, body_field)
    command = ("XADD", stream, "*", *(part for pair in fields.items() for part in pair))

    def publish() -> Any:
        # Each attempt: the stream may have the entry of one that failed.
        tell_sent(stream, chosen)
        return client.execute_command(*command)

    yield from confirmed(publish, sleep, ERRORS, is_temporary, pauses(SEND_TRIES))
    return chosen
