"""Connections cut at every message of a delivery whose record is a row: COMMIT among them, each effect once.

A delivery that fails is delivered again, as a broker does. The effects are counted by somebody who knows nothing of
Onefold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from onefold import TX, AsyncGuard, Guard, Outcome
from services.proxy import Proxy
from tests.stores.postgres.tools import ended
from tests.stores.sql.endings import DRIVERS, Driver, Hand, maybe_await
from tests.stores.sql.test_row_races import KEYS, TABLES, WRITES
from tests.stores.sqlalchemy.wallet import Ledger

NAMES = ("psycopg", "psycopg async", "asyncpg", "pymysql", "asyncmy")

# More messages than a delivery has.
MESSAGES_MAX = 40

Deliver = Callable[..., Coroutine[Any, Any, Outcome[str]]]


class Cut:
    """Cuts a connection at the n-th message of one delivery, before the server sees it or in place of its reply."""

    def __init__(self, proxy: Proxy, number: int, *, executed: bool) -> None:
        self._number = number
        self._seen = 0
        self._is_armed = False
        self.fault = (proxy.cut_after if executed else proxy.cut_before)(self._matches)

    def arm(self) -> None:
        self._is_armed = True

    def disarm(self) -> None:
        self._is_armed = False

    def _matches(self, _: bytes) -> bool:
        self._seen += self._is_armed
        return self._is_armed and self._seen == self._number


@pytest.fixture(params=[one for one in DRIVERS if one.name in NAMES], ids=lambda one: one.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    found: Driver = request.param
    return found


@pytest.fixture
def proxy(ledger: Ledger) -> Iterator[Proxy]:
    ledger.execute(TABLES[ledger.database])
    ledger.execute("CREATE TABLE effects (name VARCHAR(50))")
    with Proxy(ledger.address) as proxy:
        yield proxy


class Consumer:
    """Delivers in the guard's transaction, or in one of the caller's, each time with a connection of its own.

    A fault is armed as soon as there is a connection: greetings have nothing to do with a delivery.
    """

    def __init__(self, driver: Driver, url: str, write: str) -> None:
        self._driver, self._url, self._write = driver, url, write
        self._source = driver.source(url)
        self._guard: Any = AsyncGuard(self._source) if driver.is_async else Guard(self._source)
        self._runner = asyncio.Runner() if driver.is_async else None

    def play(self, story: Coroutine[Any, Any, Outcome[str]]) -> Outcome[str]:
        return ended(story) if self._runner is None else self._runner.run(story)

    def close(self) -> None:
        self._guard.close() if self._runner is None else self._runner.run(self._guard.aclose())
        if self._runner is not None:
            self._runner.close()

    async def transactional(self, key: str, cut: Cut | None = None) -> Outcome[str]:
        if cut is not None:
            cut.arm()
        if self._driver.is_async:

            @self._guard.transactional("pay", key="key", record=KEYS)  # type: ignore[untyped-decorator]
            async def pay_later(key: str, *, tx: Any = TX) -> str:
                return await self._work(Hand(tx), key)

            return await pay_later.outcome(key)  # type: ignore[no-any-return]

        @self._guard.transactional("pay", key="key", record=KEYS)  # type: ignore[untyped-decorator]
        def pay(key: str, *, tx: Any = TX) -> str:
            return ended(self._work(Hand(tx), key))

        return pay.outcome(key)  # type: ignore[no-any-return]

    async def within(self, key: str, cut: Cut | None = None) -> Outcome[str]:
        hand = Hand(await maybe_await(self._driver.connect(self._url)))
        if cut is not None:
            cut.arm()
        try:
            for statement in self._driver.begin:
                await hand.sql(statement)
            joined = self._guard.within(hand.connection, record=KEYS)

            def work() -> Any:
                story = self._work(hand, key)
                return story if self._driver.is_async else ended(story)

            outcome: Outcome[str] = await maybe_await(joined.run("pay", key, work, payload=key))
            await (hand.sql("COMMIT") if self._driver.begin else hand.call("commit"))
        finally:
            with suppress(Exception):  # it was cut
                await hand.call("close")
        return outcome

    async def _work(self, hand: Hand, key: str) -> str:
        if self._write:
            await hand.sql(self._write.format(key=key))
        await hand.sql(f"INSERT INTO effects VALUES ('{key}')")
        return f"receipt of {key}"


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize(("way", "write"), [("transactional", "left to Onefold"), ("within", "INSERT")])
def test_a_delivery_that_is_cut_at_any_message_has_one_effect(
    driver: Driver, ledger: Ledger, proxy: Proxy, way: str, write: str, executed: bool
) -> None:
    consumer = Consumer(driver, proxy.url(), WRITES[driver.database][write])
    deliver: Deliver = getattr(consumer, way)
    consumer.play(deliver("earlier"))
    keys = ["earlier"]
    for number in range(1, MESSAGES_MAX):
        keys.append(f"pay_{number}")
        cut = Cut(proxy, number, executed=executed)
        with suppress(Exception):
            consumer.play(deliver(keys[-1], cut))
        cut.disarm()
        assert consumer.play(deliver(keys[-1])).value == f"receipt of {keys[-1]}"
        if not cut.fault.reached.is_set():
            break
    replays = [consumer.play(deliver(key)) for key in keys]
    consumer.close()

    assert 3 < len(keys) < MESSAGES_MAX
    assert sorted(ledger.rows("SELECT name FROM effects")) == sorted((key,) for key in keys)
    assert [(one.replayed, one.value) for one in replays] == [(True, f"receipt of {key}") for key in keys]
