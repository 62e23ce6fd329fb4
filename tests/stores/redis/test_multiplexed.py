"""The connection that the tasks of an event loop share: one write for many calls, and each reply to its own caller."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from onefold import StoreUnavailable
from onefold._model import Ending, Record, State
from onefold.stores.redis import AsyncRedisStore
from onefold.stores.redis.connections.multiplexed import CALL_MAX, ROOM, MultiplexedConnection
from services.programs import in_ci
from services.proxy import Proxy
from services.redis import Pair
from services.servers import Server
from tests.stores.redis.tools import DONE, claim_of, entry
from tests.support import PATIENCE

# More than one read takes.
LARGE = 3 * ROOM + 17

REPLIES: list[tuple[bytes, Any]] = [
    (b":1\r\n", 1),
    (b":0\r\n", 0),
    (b"$-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$6\r\n\r\n:1\r\n\r\n", b"\r\n:1\r\n"),
    (b"$%d\r\n%b\r\n" % (LARGE, b"\0" * LARGE), b"\0" * LARGE),
    (b"-NOSCRIPT No matching script.\r\n", redis.exceptions.NoScriptError),
    (b"-ERR what\r\n", redis.exceptions.ResponseError),
]


class FakeTransport:
    """Notes what is written. `strikes` is raised by the next write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.strikes: BaseException | None = None
        self.aborted = self.closed = False

    def write(self, data: bytes) -> None:
        if self.strikes is not None:
            raise self.strikes
        self.written.append(data)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


def connected(patience: float | None = None) -> tuple[MultiplexedConnection, FakeTransport]:
    transport = FakeTransport()
    opened = SimpleNamespace(
        _parser=redis.asyncio.Connection()._parser,
        _host_error=lambda: "here",
        _writer=SimpleNamespace(transport=transport),
        socket_timeout=patience,
        health_check_interval=0,
    )
    return MultiplexedConnection(opened, redis.exceptions), transport


def hear(connection: MultiplexedConnection, data: bytes) -> None:
    """Read this, as the event loop does."""
    while data:
        room = connection.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size] = data[:size]
        connection.buffer_updated(size)
        data = data[size:]


def in_a_loop(story: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        asyncio.run(story())

    test.__name__ = story.__name__
    return test


# Replies.


@pytest.mark.parametrize("size", [1, 2, 7, ROOM - 1, 10 * LARGE])
def test_each_caller_gets_its_own_reply_however_the_bytes_come(size: int) -> None:
    async def story() -> None:
        connection, _ = connected()
        chosen = random.Random(size).choices(REPLIES, k=40)
        replies = [connection.call(b"call") for _ in chosen]
        stream = b"".join(sent for sent, _ in chosen)
        # Byte by byte is slow: the large reply is cut only near its ends.
        cuts = [
            at for at in range(0, len(stream), size) if size > 2 or stream[max(at - 4, 0) : at + 4].strip(b"\0") != b""
        ]
        for begin, end in zip(cuts, [*cuts[1:], len(stream)], strict=True):
            hear(connection, stream[begin:end])

        for reply, (_, expected) in zip(replies, chosen, strict=True):
            if isinstance(expected, type):
                assert type(reply.exception()) is expected
            else:
                assert reply.result() == expected

    asyncio.run(story())


@in_a_loop
async def test_the_reply_of_a_cancelled_caller_is_nobodys() -> None:
    connection, _ = connected()
    first, second, third = (connection.call(b"call") for _ in range(3))
    second.cancel()

    hear(connection, b":1\r\n:2\r\n:3\r\n")

    assert (first.result(), third.result()) == (1, 3)


@in_a_loop
async def test_calls_of_one_turn_are_written_together_and_a_single_one_at_once() -> None:
    connection, transport = connected()

    replies = [connection.call(b"%d" % number) for number in range(5)]
    assert transport.written == [b"0"]
    await asyncio.sleep(0)
    assert transport.written == [b"0", b"1234"]

    hear(connection, b":1\r\n" * 5)
    await asyncio.gather(*replies)
    for number in range(5):
        _ = connection.call(b"%d" % number)
    await asyncio.sleep(0)
    assert transport.written[2:] == [b"01234"]


@in_a_loop
async def test_room_for_a_large_reply_is_given_back() -> None:
    connection, _ = connected()
    reply = connection.call(b"call")
    hear(connection, b"$%d\r\n" % LARGE)
    assert len(connection.get_buffer(-1)) > LARGE

    hear(connection, b"x" * LARGE + b"\r\n")

    assert reply.result() == b"x" * LARGE
    assert len(connection.get_buffer(-1)) == ROOM


# Faults: the connection is aborted, and nobody gets another's reply.


async def lost(connection: MultiplexedConnection, transport: FakeTransport, reply: asyncio.Future[Any]) -> bool:
    """Whether the connection was aborted, takes no more calls, and its caller is told."""
    connection.connection_lost(None)
    with pytest.raises(redis.exceptions.ConnectionError):
        _ = connection.call(b"call")
    return transport.aborted and isinstance(reply.exception(), redis.exceptions.ConnectionError)


@in_a_loop
async def test_an_interrupt_in_a_write_ends_the_connection() -> None:
    connection, transport = connected()
    first = connection.call(b"one")
    connection.call(b"two").cancel()
    transport.strikes = KeyboardInterrupt()
    loop, raised = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: raised.append(context))

    with pytest.raises(KeyboardInterrupt):
        connection._flush()
    hear(connection, b":1\r\n")

    assert await lost(connection, transport, first)


@in_a_loop
async def test_an_interrupt_as_a_call_is_written_ends_the_connection() -> None:
    connection, transport = connected()
    transport.strikes = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        _ = connection.call(b"one")

    assert transport.aborted
    with pytest.raises(redis.exceptions.ConnectionError):
        _ = connection.call(b"two")


@in_a_loop
async def test_bytes_that_an_interrupt_has_swallowed_end_the_connection() -> None:
    connection, transport = connected()
    first, second = connection.call(b"one"), connection.call(b"two")
    # Read by the event loop, and never told.
    connection.get_buffer(-1)[:4] = b":1\r\n"

    hear(connection, b":2\r\n")

    assert not first.done()
    assert await lost(connection, transport, second)


@in_a_loop
async def test_a_read_that_finds_nothing_changes_nothing() -> None:
    # With TLS a record may be incomplete.
    connection, transport = connected()
    reply = connection.call(b"one")
    connection.get_buffer(-1)

    hear(connection, b":1\r\n")

    assert reply.result() == 1
    assert not transport.aborted


@pytest.mark.parametrize("sent", [b"*1\r\n:1\r\n", b"+OK\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b":\r\n"])
def test_what_is_no_reply_of_ours_ends_the_connection(sent: bytes) -> None:
    async def story() -> None:
        connection, transport = connected()
        reply = connection.call(b"one")

        with pytest.raises((redis.exceptions.InvalidResponse, ValueError)):
            hear(connection, sent)

        assert await lost(connection, transport, reply)

    asyncio.run(story())


@in_a_loop
async def test_a_reply_that_nobody_asked_for_ends_the_connection() -> None:
    connection, transport = connected()
    reply = connection.call(b"one")

    with pytest.raises(IndexError):
        hear(connection, b":1\r\n:2\r\n")

    assert reply.result() == 1
    assert transport.aborted


@in_a_loop
async def test_a_silent_server_fails_all_calls_and_one_that_answers_slowly_none() -> None:
    connection, transport = connected(patience=60.0)
    replies = [connection.call(b"call") for _ in range(3)]
    connection._since -= 59.0
    hear(connection, b":1\r\n")
    connection._since -= 59.0
    connection._check()
    assert not transport.aborted

    connection._since -= 2.0
    connection._check()

    assert transport.aborted
    assert replies[0].result() == 1
    failures = [reply.exception() for reply in replies[1:]]
    assert [type(failure) for failure in failures] == [redis.exceptions.TimeoutError] * 2
    # Each is raised by its own caller.
    assert failures[0] is not failures[1]


@in_a_loop
async def test_a_retired_connection_answers_its_calls_and_closes() -> None:
    connection, transport = connected()
    first, second = connection.call(b"one"), connection.call(b"two")
    connection.retire()
    assert not connection.is_usable

    hear(connection, b":1\r\n")
    assert not transport.closed
    hear(connection, b":2\r\n")

    assert (first.result(), second.result(), transport.closed) == (1, 2, True)


# On servers.


def clients_named(redis_url: str, name: str) -> list[dict[str, str]]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as raw:
        return [client for client in raw.client_list() if client["name"] == name]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[AsyncRedisStore]:
    store = AsyncRedisStore(url)
    try:
        yield store
    finally:
        await store.aclose()


def test_many_tasks_share_one_connection_and_few_round_trips(redis_url: str) -> None:
    async def story() -> None:
        with Proxy(redis_url) as proxy:
            async with opened(f"{proxy.url()}?client_name=many-tasks&socket_timeout=60s") as store:
                await store.claim(entry("to connect, and to know the script"))
                with proxy.counting() as count:
                    assert await asyncio.gather(*(store.claim(entry(f"key-{n}")) for n in range(200))) == [None] * 200

                # The other one is for renewals.
                assert len(clients_named(redis_url, "many-tasks")) == 2
                assert count.trips < 20
        assert clients_named(redis_url, "many-tasks") == []

    asyncio.run(story())


def test_whoever_is_cancelled_among_many_leaves_the_others_their_replies(redis_url: str) -> None:
    async def story() -> None:
        with Proxy(redis_url) as proxy:
            async with opened(proxy.url()) as store:
                await store.claim(entry("to know the script"))
                claims = [entry(f"key-{number}") for number in range(60)]
                held = proxy.hold_reply(b"EVALSHA")
                tasks = [asyncio.ensure_future(store.claim(claim)) for claim in claims]
                await asyncio.get_running_loop().run_in_executor(None, held.reached.wait, PATIENCE)
                for task in tasks[::3]:
                    task.cancel()
                await asyncio.wait(tasks[::3])
                held.released.set()
                found = await asyncio.gather(*(store.read(claim.address) for claim in claims))

                assert [record and record.token for record in found] == [claim.token for claim in claims]
                assert await asyncio.gather(*tasks, return_exceptions=True) != []
                assert [task.cancelled() for task in tasks] == [number % 3 == 0 for number in range(60)]

    asyncio.run(story())


@pytest.mark.parametrize("fault", ["cut_after", "cut_before"])
def test_calls_of_many_tasks_on_a_lost_connection_are_all_sent_again(fault: str, redis_url: str) -> None:
    async def story() -> None:
        with Proxy(redis_url) as proxy:
            async with opened(f"{proxy.url()}?socket_timeout=60s&socket_connect_timeout=60s") as store:
                claims = [entry(f"key-{number}") for number in range(60)]
                assert await asyncio.gather(*(store.claim(claim) for claim in claims)) == [None] * 60
                struck = getattr(proxy, fault)(b"EVALSHA")

                ends = await asyncio.gather(*(store.finish(claim_of(claim), DONE) for claim in claims))

                assert struck.reached.is_set()
                assert ends == [True] * 60
                again = await asyncio.gather(*(store.claim(entry(f"key-{number}")) for number in range(60)))
                assert [isinstance(record, Record) and record.token for record in again] == [
                    claim.token for claim in claims
                ]

    asyncio.run(story())


def test_a_callers_own_client_is_asked_through_its_pool(redis_url: str) -> None:
    async def story() -> None:
        async with redis.asyncio.Redis.from_url(redis_url, client_name="brought") as client:
            store, mine = AsyncRedisStore(client), entry()
            await store.claim(mine)
            await store.finish(claim_of(mine), DONE)

            # One of the pool, and one for renewals.
            assert len(client.connection_pool._available_connections) == 1
            assert len(clients_named(redis_url, "brought")) == 2
            await store.aclose()

    asyncio.run(story())


def test_scripts_that_the_server_has_forgotten_are_sent_again_on_the_same_connection(own_redis: Server) -> None:
    async def story() -> None:
        with redis.Redis.from_url(own_redis.url) as raw, Proxy(own_redis.url) as proxy:
            async with opened(f"{proxy.url()}?client_name=forgotten&socket_timeout=60s") as store:
                claims = [entry(f"key-{number}") for number in range(60)]
                assert await asyncio.gather(*(store.claim(claim) for claim in claims)) == [None] * 60
                raw.script_flush()
                await store.finish(claim_of(claims[0]), DONE)
                raw.script_flush()

                ends = await asyncio.gather(*(store.finish(claim_of(claim), DONE) for claim in claims))

                assert ends == [True] * 60
                assert len(clients_named(own_redis.url, "forgotten")) == 2

    asyncio.run(story())


def test_a_large_call_takes_a_connection_of_the_pool(redis_url: str) -> None:
    async def story() -> None:
        async with opened(f"{redis_url}?client_name=large-call") as store:
            mine, result = entry(), b"x" * (CALL_MAX + 1)
            await store.claim(mine)
            assert len(clients_named(redis_url, "large-call")) == 2

            assert await store.finish(claim_of(mine), Ending(state=State.DONE, ttl=60.0, result=result))

            assert len(clients_named(redis_url, "large-call")) == 3
            found = await store.read(mine.address)
            assert found is not None
            assert found.result == result

    asyncio.run(story())


def test_a_connection_that_was_idle_for_too_long_is_replaced(redis_url: str) -> None:
    async def story() -> None:
        async with opened(f"{redis_url}?client_name=idle&health_check_interval=30s") as store:
            await store.claim(entry("first"))
            (here,) = store._loops._here.values()
            assert here.sender._multiplexer is not None
            (before,) = here.sender._multiplexer._connections.values()
            await store.claim(entry("second"))
            assert [*here.sender._multiplexer._connections.values()] == [before]
            before._since -= 31.0

            await store.claim(entry("third"))

            (after,) = here.sender._multiplexer._connections.values()
            assert after is not before

    asyncio.run(story())


def test_a_primary_that_became_a_replica_is_asked_on_no_old_connection(own_redis_pair: Pair) -> None:
    async def story() -> None:
        async with opened(own_redis_pair.url) as store:
            await store.claim(entry("first"))
            (here,) = store._loops._here.values()
            assert here.sender._multiplexer is not None
            assert here.sender._multiplexer._connections
            with redis.Redis.from_url(own_redis_pair.url) as raw:
                raw.replicaof("127.0.0.1", "1")
                with pytest.raises(StoreUnavailable, match="read-only replica"):
                    await store.claim(entry("second"))
                assert not here.sender._multiplexer._connections
                raw.replicaof("NO", "ONE")

            assert await store.claim(entry("second")) is None

    asyncio.run(story())


def test_tasks_that_wait_for_a_connection_share_one_attempt_and_are_all_told(redis_url: str) -> None:
    async def story() -> list[Any]:
        with Proxy(redis_url) as proxy:
            async with opened(f"{proxy.url()}?socket_connect_timeout=1s&socket_timeout=1s") as store:
                await store.claim(entry("first"))
                (here,) = store._loops._here.values()
                assert here.sender._multiplexer is not None
                here.sender._multiplexer.retire_all()
                proxy.stall()
                found = await asyncio.gather(
                    *(store.claim(entry(f"key-{number}")) for number in range(50)), return_exceptions=True
                )
                proxy.resume()
                return list(found)

    found = asyncio.run(story())

    assert {type(error) for error in found} == {StoreUnavailable}
    assert len({id(error.__cause__) for error in found}) == 50


async def opening(store: AsyncRedisStore) -> asyncio.Task[MultiplexedConnection]:
    """Wait until the shared connection is being opened; return the task that opens it."""
    while True:
        for here in store._loops._here.values():
            if here.sender._multiplexer is not None and here.sender._multiplexer._opening:
                return next(iter(here.sender._multiplexer._opening.values()))
        await asyncio.sleep(0)


def test_whoever_waits_for_a_connection_as_the_store_is_closed_is_not_cancelled(redis_url: str) -> None:
    async def story() -> None:
        with Proxy(redis_url) as proxy:
            store, known = AsyncRedisStore(f"{proxy.url()}?socket_timeout=60s&socket_connect_timeout=60s"), entry()
            proxy.stall()
            waiting = asyncio.ensure_future(store.read(known.address))
            _ = await opening(store)
            (here,) = store._loops._here.values()
            client = here.sender.client
            await store.aclose()
            proxy.resume()

            assert await waiting is None
            await client.aclose()

    asyncio.run(story())


def test_a_connection_that_fails_when_nobody_waits_any_more_is_no_unseen_error(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        with Proxy(redis_url) as proxy:
            url = proxy.url()
        async with opened(url) as store:
            waiting = asyncio.ensure_future(store.read(entry().address))
            attempt = await opening(store)
            waiting.cancel()
            await asyncio.wait({waiting, attempt})
            assert waiting.cancelled()

    asyncio.run(story())
    gc.collect()

    assert caplog.records == []


# TLS.


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    program = shutil.which("openssl")
    if program is None:
        (pytest.fail if in_ci() else pytest.skip)("openssl is missing: TLS to Redis is not proven")
    subprocess.run(
        [
            *(program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=server"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", tmp_path / "server.key", "-out", tmp_path / "server.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return tmp_path / "server.pem"


def test_many_tasks_share_a_connection_with_tls(redis_url: str, certificate: Path) -> None:
    async def story() -> None:
        async with (
            tls_in_front_of(redis_url, certificate) as url,
            # One task after the other has its turn on a slow machine, and no connection is to be given up for it.
            opened(f"{url}&socket_timeout=60s&socket_connect_timeout=60s") as store,
        ):
            claims = [entry(f"key-{number}") for number in range(60)]
            assert await asyncio.gather(*(store.claim(claim) for claim in claims)) == [None] * 60
            large = Ending(state=State.DONE, ttl=60.0, result=b"x" * (CALL_MAX - 1_000))
            assert all(await asyncio.gather(*(store.finish(claim_of(claim), large) for claim in claims)))
            found = await asyncio.gather(*(store.read(claim.address) for claim in claims))
            assert [record and (record.token, record.result) for record in found] == [
                (claim.token, large.result) for claim in claims
            ]

    asyncio.run(story())


@asynccontextmanager
async def tls_in_front_of(redis_url: str, certificate: Path) -> AsyncIterator[str]:
    """A server with TLS that passes everything on to this one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    host, port = redis_url.removeprefix("redis://").partition("/")[0].split(":")

    async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(ROOM):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection(host, int(port))
        await asyncio.gather(passed(reader, behind[1]), passed(behind[0], writer))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=context)
    async with server:
        (listening,) = server.sockets
        yield f"rediss://127.0.0.1:{listening.getsockname()[1]}/0?ssl_ca_certs={certificate}"
