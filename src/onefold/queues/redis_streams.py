"""Redis Streams with redis-py: a worker of a consumer group, sync or async, and senders that create keys.

    worker = guarded(
        guard, "charge", charge, key=header(), stream="charges", group="charge", dead_letter="charges.dead"
    )
    worker.consume(redis.Redis())                   # until worker.stop()
    await worker.consume(redis.asyncio.Redis())     # with an AsyncGuard

Every entry that a worker has taken is kept from other consumers while it waits for its turn or its handler runs; one
whose claim is lost is not. An entry that has to come later stays with its worker, and goes to another if that dies.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, Unpack, overload

from onefold import AsyncGuard, Guard, Policy, PolicyFields, RecordColumn, UsageError
from onefold._checks import at_least
from onefold._concurrency.generators import Flow, run, run_async
from onefold.durations import Duration, seconds
from onefold.queues._redis_streams.consumer import BEGINNING, BODY_FIELD, MIN_IDLE, Delivery, Rules, rules
from onefold.queues._shared.consumer import AsyncConsuming, Consuming, MissingKeyRule
from onefold.queues._shared.failures import ATTEMPTS
from onefold.queues._shared.logs import waits_of
from onefold.queues._shared.options import check_transactions, policy_of
from onefold.queues._shared.verdict import SOON, Later, Verdict
from onefold.queues.keys import KeyOf, PayloadOf

try:
    import redis
    import redis.asyncio

    from onefold.queues._redis_streams.jobs import Job
    from onefold.queues._redis_streams.loop import FETCH_SECONDS, Loop
    from onefold.queues._redis_streams.requests import Requests
    from onefold.queues._redis_streams.sending import send, send_async
except ImportError as missing:
    raise UsageError("onefold.queues.redis_streams needs redis-py: pip install 'onefold[redis]'") from missing

__all__ = ["AsyncGuardedConsumer", "Delivery", "GuardedConsumer", "guarded", "send", "send_async"]

# How many entries a worker has at a time, at least: those that run, and those that were read ahead.
BATCH_MIN: Final = 10

# How often `drain` looks whether everything is settled.
DRAIN_SECONDS: Final = 0.02


class Options(PolicyFields, total=False):
    """The options of `guarded` that have a default."""

    missing_key: MissingKeyRule
    payload: PayloadOf | None
    attempts: int
    min_idle: Duration
    start: str
    body_field: str
    concurrency: int
    record: RecordColumn | None
    policy: Policy | None


@overload
def guarded(
    guard: Guard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    stream: str,
    group: str,
    dead_letter: str,
    **options: Unpack[Options],
) -> GuardedConsumer: ...


@overload
def guarded(
    guard: AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    stream: str,
    group: str,
    dead_letter: str,
    **options: Unpack[Options],
) -> AsyncGuardedConsumer: ...


def guarded(
    guard: Guard | AsyncGuard,
    operation: str,
    handler: Callable[..., Any],
    *,
    key: KeyOf,
    stream: str,
    group: str,
    dead_letter: str,
    missing_key: MissingKeyRule = "never",
    payload: PayloadOf | None = None,
    attempts: int = ATTEMPTS,
    min_idle: Duration = MIN_IDLE,
    start: str = BEGINNING,
    body_field: str = BODY_FIELD,
    concurrency: int = 1,
    record: RecordColumn | None = None,
    policy: Policy | None = None,
    **fields: Unpack[PolicyFields],
) -> GuardedConsumer | AsyncGuardedConsumer:
    """Return a worker of a group: it calls or awaits `handler(delivery)`, or `handler(delivery, tx=…)`, once a key.

    `docs/queues/redis-streams.md` explains each argument.
    """
    at_least(1, concurrency, "concurrency")
    is_async = isinstance(guard, AsyncGuard)
    chosen = policy_of(guard, AsyncGuard if is_async else Guard, policy, fields, guarded)
    options: dict[str, Any] = {"key": key, "missing_key": missing_key, "policy": chosen, "payload": payload}
    consuming = (AsyncConsuming if is_async else Consuming)(guard, operation, handler, **options, record=record)  # type: ignore[arg-type]
    check_transactions(guard, handler)
    checked = rules(
        operation,
        stream=stream,
        group=group,
        dead_letter=dead_letter,
        attempts=attempts,
        min_idle=min_idle,
        start=start,
        body_field=body_field,
        waits=waits_of(guard),
    )
    kind: Any = AsyncGuardedConsumer if is_async else GuardedConsumer
    return kind(consuming, checked, concurrency, runs_without_key=missing_key == "run")  # type: ignore[no-any-return]


class _Worker:
    """The part of a worker that sync and async share."""

    _clients: tuple[type, ...]

    def __init__(self, consuming: Any, rules: Rules, concurrency: int, *, runs_without_key: bool = False) -> None:
        self._consuming = consuming
        self._rules = rules
        self._concurrency = concurrency
        self._runs_without_key = runs_without_key
        self._loops: set[Loop] = set()
        self._is_leaving = False

    def stop(self) -> None:
        """Start nothing more: `consume` returns once running handlers are settled. May be called by a signal handler.

        Entries that were not started are given back, and other workers get them soon. To consume again, create another
        worker.
        """
        # Nothing but plain attributes: a signal may come while a lock is held.
        self._is_leaving = True
        for loop in tuple(self._loops):
            loop.is_leaving = True

    def _loop(self, client: Any, consumer: object, batch: int | None, **how: Any) -> Loop:
        if not isinstance(client, self._clients) or hasattr(client, "command_stack"):
            # A pipeline is a client, too, and only collects requests.
            wanted = " or ".join(f"{one.__module__.partition('.c')[0]}.{one.__name__}" for one in self._clients)
            raise UsageError(f"consume() takes a client of redis-py, {wanted}, not {type(client).__name__}")
        if consumer is not None and (not consumer or not isinstance(consumer, str)):
            raise UsageError(f"consumer={consumer!r} has to be a name that no other worker of the group has at a time")
        batch = max(BATCH_MIN, 2 * self._concurrency) if batch is None else at_least(1, batch, "batch")
        options: Any = client
        timeout = options.get_connection_kwargs().get("socket_timeout")
        loop = Loop(
            Requests(client, self._rules, consumer or _name()),
            self._rules,
            batch,
            # A client that gives up first would take an empty stream for a lost connection.
            block=timeout / 2 if timeout else FETCH_SECONDS,
            address_of=self._consuming.address_of,
            runs_without_key=self._runs_without_key,
            leaves_group=consumer is None,
            **how,
        )
        loop.is_leaving = self._is_leaving
        return loop


class GuardedConsumer(_Worker):
    """A worker with a blocking client. Created by `guarded`."""

    _clients = (redis.Redis, redis.RedisCluster)

    def consume(self, client: Any, *, consumer: str | None = None, batch: int | None = None) -> None:
        """Take and handle entries until `stop` or `drain` is called, and wait for a server that is gone.

        Handlers run in this thread, and in others if there may be several at a time. At most `batch` entries are with
        this worker at a time: twice as many as may run, and at least 10; those that wait do not count. Raises
        redis-py's error if it does not go away by itself: a wrong password, a key that is no stream.
        """
        one_at_a_time, over = threading.Lock(), threading.Event()

        def fetch_alone() -> None:
            # Whoever waits here finds what the other has fetched.
            with one_at_a_time:
                run(loop.fetch())

        def until_over(flow: Flow[None]) -> None:
            try:
                run(flow)
            finally:
                # Nobody may go on working whose entries nobody keeps.
                loop.is_leaving = True

        loop = self._loop(client, consumer, batch, call=self._call, fetch_alone=fetch_alone, sleep=over.wait)
        self._loops.add(loop)
        try:
            run(loop.begin())
            with ThreadPoolExecutor(self._concurrency, f"onefold {self._rules.operation}") as threads:
                keeping = threads.submit(until_over, loop.keep())
                others = [threads.submit(until_over, loop.work()) for _ in range(self._concurrency - 1)]
                try:
                    until_over(loop.work())
                    for one in others:
                        one.result()
                finally:
                    loop.is_leaving = True
                    wait(others)
                    loop.is_over = True
                    over.set()
                    wait([keeping])
                    run(loop.leave())
                keeping.result()
        finally:
            self._loops.discard(loop)

    def drain(self, within: Duration = 30) -> bool:
        """Stop, and wait until `consume` has settled everything. Return False if a handler still runs then.

        For another thread than that of `consume`; a signal handler calls `stop`.
        """
        deadline = time.monotonic() + seconds(within, "within")
        self.stop()
        while self._loops and time.monotonic() < deadline:
            time.sleep(DRAIN_SECONDS)
        return not self._loops

    def _call(self, job: Job) -> Verdict:
        try:
            verdict: Verdict = self._consuming.deliver(
                job.delivery.message, job.delivery, held_before=job.times_held, on_start=job.started
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - its claim is kept until it ends
            return Later(SOON, f"the handler raised {type(error).__name__}")
        return verdict


class AsyncGuardedConsumer(_Worker):
    """A worker with a client of redis.asyncio. Created by `guarded`."""

    _clients = (redis.asyncio.Redis, redis.asyncio.RedisCluster)

    def __init__(self, consuming: Any, rules: Rules, concurrency: int, *, runs_without_key: bool = False) -> None:
        super().__init__(consuming, rules, concurrency, runs_without_key=runs_without_key)
        self._ended: set[asyncio.Future[None]] = set()

    async def consume(self, client: Any, *, consumer: str | None = None, batch: int | None = None) -> None:
        """Take and handle entries until `stop` or `drain` is called, and wait for a server that is gone.

        At most `batch` entries are with this worker at a time: twice as many as may run, and at least 10; those that
        wait do not count. Raises redis-py's error if it does not go away by itself: a wrong password, a key that is no
        stream. If it is cancelled, so are the handlers that run.
        """
        one_at_a_time = asyncio.Lock()

        async def fetch_alone() -> None:
            # Whoever waits here finds what the other has fetched.
            async with one_at_a_time:
                await run_async(loop.fetch())

        async def until_over(flow: Flow[None]) -> None:
            try:
                await run_async(flow)
            finally:
                # Nobody may go on working whose entries nobody keeps.
                loop.is_leaving = True

        call = partial(self._call, asyncio.current_task())
        loop = self._loop(client, consumer, batch, call=call, fetch_alone=fetch_alone, sleep=asyncio.sleep)
        ended = asyncio.get_running_loop().create_future()
        self._loops.add(loop)
        self._ended.add(ended)
        try:
            await run_async(loop.begin())
            keeping = asyncio.create_task(until_over(loop.keep()))
            workers = [asyncio.create_task(until_over(loop.work())) for _ in range(self._concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                try:
                    # Of one that has failed, the others are waited for; whoever cancels that cancels them.
                    await asyncio.gather(*workers, return_exceptions=True)
                finally:
                    keeping.cancel()
                    await asyncio.wait([keeping])
                    await run_async(loop.leave())
            if not keeping.cancelled():
                keeping.result()
        finally:
            self._loops.discard(loop)
            self._ended.discard(ended)
            ended.set_result(None)

    async def drain(self, within: Duration = 30) -> bool:
        """Stop, and wait until `consume` has settled everything. Return False if a handler still runs then."""
        self.stop()
        if self._ended:
            await asyncio.wait(self._ended, timeout=seconds(within, "within"))
        return not self._loops

    async def _call(self, consuming: asyncio.Task[Any] | None, job: Job) -> Verdict:
        try:
            verdict: Verdict = await self._consuming.deliver(
                job.delivery.message, job.delivery, held_before=job.times_held, on_start=job.started
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or consuming is None or consuming.cancelling():
                raise
            # By its own handler: nobody has cancelled this worker.
            while task.cancelling():
                task.uncancel()
            return Later(SOON, f"the handler raised {type(error).__name__}")
        except BaseException as error:  # noqa: BLE001 - its claim is kept until it ends
            return Later(SOON, f"the handler raised {type(error).__name__}")
        return verdict


def _name() -> str:
    """Return the name of a consumer that nobody else has."""
    return f"onefold-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
