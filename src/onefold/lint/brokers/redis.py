"""Redis Streams: what a stream and its group hold, and what nobody will handle, through redis-py.

`queue` is the key of the stream, or `stream/group`. Nothing is created, and no entry is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from onefold.health.report import Check, green, red, unknown, yellow
from onefold.lint.brokers.answers import Answer, Silent

# A pending entry that nobody has kept for so long is no worker's.
ABANDONED_SECONDS: Final = 3_600

# An id before that of any entry.
NONE_AT_ALL: Final = (0, 0)


class Told(NamedTuple):
    """What a server says of a stream, and of one of its groups."""

    length: int
    # Of the oldest entry; of an empty stream, of one that would come next.
    first: tuple[int, int]
    # Nothing is known of a group that was not asked for.
    pending: int | None = None
    oldest_pending: tuple[int, int] = NONE_AT_ALL
    has_abandoned: bool = False


def ask(url: str, queue: str, timeout: float) -> Answer:
    import redis
    from redis.exceptions import RedisError

    parts = urlsplit(url)
    scheme = "rediss" if parts.scheme in ("rediss", "valkeys") else "redis"
    patience = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    try:
        with redis.Redis.from_url(parts._replace(scheme=scheme).geturl(), **patience) as client:
            told = _told(client, queue)
    except (RedisError, OSError, ValueError) as error:
        raise Silent(f"Redis does not tell the state of {queue}: {_said(error)}") from None
    return Answer((), [_exists(queue, told), *_of_group(told), RETENTION])


def _told(client: Any, queue: str) -> Told:
    # A key may have a slash in it.
    name, group = (queue, "") if client.exists(queue) else (queue.rpartition("/")[0] or queue, queue.rpartition("/")[2])
    if not client.exists(name):
        raise ValueError("there is no such key")
    info = client.xinfo_stream(name)
    first = info["first-entry"]
    told = Told(info["length"], _number(first[0]) if first else _number(info["last-generated-id"], 1))
    if not group:
        return told
    pending = client.xpending(name, group)
    idle = client.xpending_range(name, group, "-", "+", 1, idle=ABANDONED_SECONDS * 1000) if pending["pending"] else []
    oldest = _number(pending["min"]) if pending["pending"] else told.first
    return told._replace(pending=pending["pending"], oldest_pending=oldest, has_abandoned=bool(idle))


def _number(entry_id: Any, more: int = 0) -> tuple[int, int]:
    first, _, second = (entry_id.decode() if isinstance(entry_id, bytes) else str(entry_id)).partition("-")
    return int(first), int(second) + more


def _said(error: Exception) -> str:
    """Return an error without what it may tell of a login: that Redis knows neither stream nor group is no secret."""
    text = str(error)
    if text.startswith("WRONGTYPE"):
        return "it is no stream (Celery, Dramatiq and RQ have lists, which tell nothing)"
    return text if isinstance(error, ValueError) or text.startswith("NOGROUP") else type(error).__name__


def _exists(queue: str, told: Told) -> Check:
    entries = "1 entry" if told.length == 1 else f"{told.length:,} entries"
    pending = "" if told.pending is None else f", and {told.pending:,} are pending in this group"
    return green("queue", f"{queue} has {entries}{pending}")


def _of_group(told: Told) -> Iterator[Check]:
    if told.pending and told.oldest_pending < told.first:
        yield red(
            "trimmed",
            "entries were trimmed or deleted while they were pending: they are lost if their worker dies",
            "Trim only below the oldest pending entry: XTRIM … MINID with the second value of XPENDING",
        )
    if told.has_abandoned:
        yield yellow(
            "pending",
            "an entry is pending that nobody has kept for an hour, and nobody claims",
            "Start a worker of this group; XPENDING shows whose it is",
        )


RETENTION: Final = unknown(
    "retention",
    "Redis does not know how long a stream keeps its entries: until somebody trims them",
    "Write the longest time that an entry can stay in the stream into the file: replays: {stream: 7d}",
)
