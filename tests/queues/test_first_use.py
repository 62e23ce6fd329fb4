"""Queues check a store once, before the first message: what works goes on, what cannot work waits, and says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from celery import Celery
from celery.signals import worker_init

from onefold import AsyncGuard, Guard, StoreUnavailable
from onefold.health.first_use import CHECKS_MAX, first_use_of
from onefold.queues import keys
from onefold.queues._shared.batches import Batches
from onefold.queues._shared.consumer import AsyncConsuming, Consuming
from onefold.queues._shared.jobs.handler import GuardedJob, JobCall
from onefold.queues._shared.verdict import ACK, HELD_DELAY, Later, Verdict
from onefold.queues.babelqueue import CannotWork, wrap
from onefold.queues.celery import guarded
from onefold.queues.keys import Message
from onefold.queues.rq.jobs import FRAMEWORK
from services.house import House
from services.redis import named_client
from services.servers import Server
from tests.health.test_sql import set_for_session
from tests.health.tools import use
from tests.queues.test_tenants import GIVEN


class OnItsWay(NamedTuple):
    message: Message
    native: str


def sent(number: int) -> Message:
    return Message(b"{}", {"idempotency-key": f"pay-{number}"})


class Consumer:
    """A consumer of one kind, and how often its handler ran."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.ran = 0
        self._kind = kind
        guard_of: Any = AsyncGuard if kind == "async" else Guard
        self.guard = guard_of(url, **options)
        if kind == "async":
            self._loop = asyncio.Runner()
            self._one: Any = AsyncConsuming(self.guard, "charge", self._handle_async, key=keys.header())
        else:
            self._one = Consuming(self.guard, "charge", self._handle, key=keys.header())
        if kind == "job":
            self._job = GuardedJob(FRAMEWORK, "charge", self.guard, "charge", self._handle, GIVEN)
        self._many = Batches(self.guard, "charge", self._handle, key=keys.header(), missing_key="never", policy=None)

    def _handle(self, _body: object) -> None:
        self.ran += 1

    async def _handle_async(self, _body: object) -> None:
        self.ran += 1

    def take(self, number: int) -> Verdict:
        if self._kind == "async":
            return self._loop.run(self._one.deliver(sent(number), "body"))  # type: ignore[no-any-return]
        if self._kind == "batch":
            return self._many.deliver([OnItsWay(sent(number), "body")])[0]
        if self._kind == "job":
            return self._job.deliver(JobCall("jobs", "id", sent(number).headers, ("body",), {})).verdict
        return self._one.deliver(sent(number), "body")  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._kind == "async":
            self._loop.run(self.guard.aclose())
            self._loop.close()
        else:
            self.guard.close()


@pytest.fixture(params=["sync", "async", "batch", "job"])
def consumer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(url: str, **options: Any) -> Consumer:
        made.append(Consumer(request.param, url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def server(house: House) -> Iterator[Server]:
    with house.own("redis") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with named_client(server.url) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory-policy", "noeviction")


@pytest.fixture
def read_only(postgres_url: str) -> str:
    use(postgres_url)
    return set_for_session(postgres_url, default_transaction_read_only="on")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_an_evicting_redis_is_logged_once_and_messages_go_on(
    consumer: Callable[..., Consumer], server: Server, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    mine = consumer(server.url)

    assert [mine.take(number) for number in range(3)] == [ACK] * 3

    assert mine.ran == 3
    (told,) = errors(caplog)
    assert "maxmemory-policy is allkeys-lru" in told
    assert "CONFIG SET maxmemory-policy noeviction" in told


def test_a_store_that_cannot_be_written_makes_messages_wait_with_the_whole_reason(
    consumer: Callable[..., Consumer], read_only: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine = consumer(read_only)

    verdicts = [mine.take(number) for number in range(2)]

    assert mine.ran == 0
    for verdict in verdicts:
        assert isinstance(verdict, Later)
        assert verdict.delay == HELD_DELAY
        assert "Reset default_transaction_read_only" in verdict.reason
    assert len(errors(caplog)) == 1


def test_where_unprotected_work_is_asked_for_it_is_done(consumer: Callable[..., Consumer], read_only: str) -> None:
    mine = consumer(read_only, store_down="run")

    assert mine.take(1) == ACK
    assert mine.ran == 1


def test_a_store_that_is_down_makes_messages_wait_as_ever_and_is_checked_once_it_answers(
    consumer: Callable[..., Consumer], house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with house.own("redis") as server:
        mine = consumer(server.url)
        server.kill()
        verdict = mine.take(1)
        server.restart()
        with named_client(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        again = mine.take(1)

    assert isinstance(verdict, Later)
    assert isinstance(verdict.error, StoreUnavailable)
    assert again == ACK
    assert len(errors(caplog)) == 1


def test_a_store_that_stays_down_is_not_checked_forever(consumer: Callable[..., Consumer]) -> None:
    mine = consumer("redis://127.0.0.1:1")

    for number in range(CHECKS_MAX):
        assert not first_use_of(mine.guard).is_over
        mine.take(number)

    assert first_use_of(mine.guard).is_over


def test_from_the_second_message_on_a_delivery_makes_its_own_round_trips_only(
    consumer: Callable[..., Consumer], server: Server, client: Any
) -> None:
    mine = consumer(server.url)
    mine.take(0)
    counts = []
    for number in range(1, 4):
        client.config_resetstat()
        mine.take(number)
        stats = client.info("commandstats")
        asked = {name.partition("_")[2].partition("|")[0]: told["calls"] for name, told in stats.items()}
        counts.append({name: calls for name, calls in asked.items() if name in ("evalsha", "scan", "info")})

    # A claim and a finish; and INFO is not counted before it is answered.
    assert counts == [{"evalsha": 2}] * 3


def test_babelqueue_stops_at_a_store_that_cannot_be_written(read_only: str) -> None:
    ran = []
    with Guard(read_only) as guard:
        wrapped = wrap(guard, lambda data, _meta: ran.append(data))

        with pytest.raises(CannotWork, match="Reset default_transaction_read_only"):
            wrapped({}, {"id": "m-1"})

    assert ran == []


def test_a_worker_of_celery_does_not_start_on_a_store_that_cannot_be_written(read_only: str) -> None:
    app = Celery("test", broker="memory://")
    with Guard(read_only) as guard:

        @guarded(app, guard, "charge")
        def charge(amount: int) -> int:
            return amount

        with pytest.raises(SystemExit, match="Reset default_transaction_read_only"):
            worker_init.send(sender=app)


def test_a_worker_of_celery_checks_each_guard_of_its_tasks_once(
    server: Server, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    app = Celery("test", broker="memory://")
    with Guard(server.url) as guard:

        @guarded(app, guard, "charge")
        def charge(amount: int) -> int:
            return amount

        worker_init.send(sender=app)
        worker_init.send(sender=app)

        assert charge.apply((3,)).get() == 3

    assert len(errors(caplog)) == 1
