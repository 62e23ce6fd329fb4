"""Collect the facts that Redis and Valkey report about themselves, server by server, without judgement.

Nothing is written. Managed services forbid some of the commands; those facts are `Untold`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from onefold.stores.base import Untold
from onefold.stores.redis.routing import Exchange, NodeBatch, RedisFlow, Topology, Wait

SETTINGS: Final = ("save", "appendfsync", "min-replicas-to-write")

# A sample of the keys is enough to see foreign ones; scanning all would keep a large server busy.
SAMPLE_ROUNDS_MAX: Final = 10
SAMPLE_COUNT: Final = b"1000"

# The facts that are missing for an unreachable server.
NAMES: Final = ("info", "clock", *SETTINGS, "cluster", "sample")


def facts_of(topology: Topology, prefix: bytes, wait: Wait | None) -> RedisFlow[dict[str, Any]]:
    """Return the facts of each primary. If none of them answers, raise the client library's error."""
    servers: list[dict[str, Any]] = []
    lost = []
    for node in topology.nodes():
        try:
            told = yield from _told_by(node, prefix, clustered=topology.clustered)
        except topology.errors.ConnectionError as error:
            lost.append(error)
            told = dict.fromkeys(NAMES, Untold(f"it cannot be reached: {error}"))
        servers.append({"name": getattr(node, "name", "")} | told)
    if len(lost) == len(servers) and lost:
        raise lost[0]
    return {
        "kind": "redis",
        "clustered": topology.clustered,
        "wait_replicas": 0 if wait is None else wait.replicas,
        "clock": servers[0]["clock"],
        "evicted_keys": _evicted(server["info"] for server in servers),
        "servers": servers,
    }


def _evicted(infos: Iterable[dict[str, str] | Untold]) -> int | Untold:
    """Return how many keys the servers have evicted since they started, as far as they report it."""
    told = [int(info["evicted_keys"]) for info in infos if not isinstance(info, Untold) and "evicted_keys" in info]
    return sum(told) if told else Untold("no server reports it")


def _told_by(node: Any, prefix: bytes, *, clustered: bool) -> RedisFlow[dict[str, Any]]:
    asked = time.time()
    now, answered = (yield from _asked(node, [(b"TIME",)]))[0], time.time()
    questions = [(b"INFO",), *((b"CONFIG", b"GET", name.encode()) for name in SETTINGS)]
    if clustered:
        questions.append((b"CLUSTER", b"INFO"))
    info, *rest = yield from _asked(node, questions)
    return {
        "clock": now if isinstance(now, Untold) else (asked, int(now[0]) + int(now[1]) / 1e6, answered),
        "info": _lines(info),
        **{name: _value(reply) for name, reply in zip(SETTINGS, rest, strict=False)},
        "cluster": _lines(rest[-1]) if clustered else None,
        "sample": (yield from _sample(node, prefix)),
    }


def _asked(node: Any, questions: list[tuple[bytes, ...]]) -> RedisFlow[list[Any]]:
    """Return the replies of one node to one message. A refusal is `Untold`; a lost connection is raised."""
    (answer,) = yield Exchange([NodeBatch(node, questions)])
    if isinstance(answer, Exception):
        # An idle connection may have been dead. The others were dropped with it, so this one is new.
        (answer,) = yield Exchange([NodeBatch(node, questions)])
    if isinstance(answer, Exception):
        raise answer
    return [Untold(f"the server says: {one}") if isinstance(one, Exception) else one for one in answer]


def _sample(node: Any, prefix: bytes) -> RedisFlow[dict[str, int] | Untold]:
    """Return how many of some keys do not begin with our prefix. The keys themselves are not shown."""
    cursor, seen, foreign = b"0", 0, 0
    for _ in range(SAMPLE_ROUNDS_MAX):
        (reply,) = yield from _asked(node, [(b"SCAN", cursor, b"COUNT", SAMPLE_COUNT)])
        if isinstance(reply, Untold):
            return reply
        cursor, keys = reply
        seen += len(keys)
        foreign += sum(not key.startswith(prefix) for key in keys)
        if cursor == b"0":
            break
    return {"seen": seen, "foreign": foreign}


def _lines(reply: Any) -> dict[str, str] | Untold:
    """Parse the reply of INFO, or of CLUSTER INFO: one line for each field."""
    if isinstance(reply, Untold):
        return reply
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _value(reply: Any) -> str | Untold:
    """Parse the reply of CONFIG GET: a name and its value, in RESP3 a map."""
    if isinstance(reply, Untold):
        return reply
    flat = [part for pair in reply.items() for part in pair] if isinstance(reply, Mapping) else list(reply)
    return flat[1].decode(errors="replace") if len(flat) > 1 else Untold("this server does not know the setting")
