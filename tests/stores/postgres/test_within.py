"""`within` on PostgreSQL, on each driver: a transaction that the caller owns (rows 14 to 18 and 25b of edge cases)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row

from onefold import AsyncGuard, Guard, InsideItself, KeyReused, NotInTransaction, Policy, StoreUnavailable, UsageError
from onefold.stores.postgres import joined as postgres_joined
from services.proxy import Proxy
from tests.stores.postgres.tools import (
    DAILY_DRIVERS,
    SCHEMA,
    Asyncpg,
    AsyncPsycopg,
    Caller,
    Hand,
    Psycopg,
    Worker,
    add,
    another,
    balance,
    never_opened,
    records,
    rows,
    tables,
)
from tests.stores.sql.versions import REFUSED, TOO_NEW
from tests.support import Died, Handler

VIOLATIONS = (psycopg.errors.IntegrityError, asyncpg.IntegrityConstraintViolationError)


@pytest.fixture
def url(postgres_url: str) -> str:
    with another(postgres_url) as connection:
        connection.execute(SCHEMA)
    # As in a process that has not been there yet.
    postgres_joined.looked.clear()
    return postgres_url


@pytest.fixture(params=DAILY_DRIVERS)
def worker(request: pytest.FixtureRequest, url: str) -> Iterator[Worker]:
    worker = request.param(url, source=never_opened)
    yield worker
    worker.close()


class RolledBack(Exception):
    """What makes the caller's transaction roll back."""


def handling(handler: Handler) -> Callable[[Hand], Any]:
    async def work(_: Hand) -> Any:
        return handler()

    return work


def test_the_record_commits_with_the_work_and_the_guards_own_store_is_never_opened(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> tuple[Any, ...]:
        async with worker.connected() as caller:
            async with caller.transaction():
                first = await caller.within("m1", add)
                before = balance(url), records(url)
            async with caller.transaction():
                second = await caller.within("m1", add)
        return before, first.replayed, second.replayed

    assert worker.play(story) == ((0, []), False, True)
    assert (balance(url), records(url)) == (10, ["m1"])


def test_the_callers_rollback_takes_the_record_back_and_the_next_delivery_runs(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> bool:
        async with worker.connected() as caller:
            with suppress(RolledBack):
                async with caller.transaction():
                    await caller.within("m1", add)
                    raise RolledBack
            async with caller.transaction():
                return (await caller.within("m1", add)).replayed

    assert worker.play(story) is False
    assert (balance(url), records(url)) == (10, ["m1"])


def test_a_savepoint_that_is_rolled_back_takes_the_record_back_and_nothing_else(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> None:
        async with worker.connected() as caller, caller.transaction():
            await caller.within("m1", add)
            with suppress(RolledBack):
                async with caller.transaction():
                    await caller.within("m2", add)
                    raise RolledBack

    worker.play(story)

    assert (balance(url), records(url)) == (10, ["m1"])


@pytest.mark.parametrize("error", [ValueError("no"), Died()])
def test_when_the_handler_raises_and_the_caller_commits_the_next_delivery_runs(
    worker: Worker, url: str, error: BaseException
) -> None:
    async def story(worker: Worker) -> bool:
        async with worker.connected() as caller:
            async with caller.transaction():
                with pytest.raises(type(error)) as raised:
                    await caller.within("m1", handling(Handler(error=error)))
                await add(caller, 1)
            assert raised.value is error
            async with caller.transaction():
                return (await caller.within("m1", add)).replayed

    assert worker.play(story) is False
    assert (balance(url), records(url)) == (11, ["m1"])


def test_where_no_transaction_is_open_it_is_refused_before_anything_runs(worker: Worker, url: str) -> None:
    handler = Handler()
    options = {} if isinstance(worker, Asyncpg) else {"autocommit": True}

    async def story(worker: Worker) -> None:
        async with worker.connected(**options) as caller:
            with pytest.raises(NotInTransaction, match="no transaction is open"):
                await caller.within("m1", handling(handler))

    worker.play(story)

    assert (handler.starts, records(url)) == (0, [])


@pytest.mark.parametrize("driver", [Psycopg, AsyncPsycopg])
@pytest.mark.parametrize("how", ["psycopg begins it", "begun by hand", "a block", "a block in autocommit mode"])
def test_every_way_to_be_in_a_transaction_will_do(driver: type[Worker], url: str, how: str) -> None:
    worker = driver(url, source=never_opened)

    async def deliver(worker: Worker) -> bool:
        async with worker.connected(autocommit="autocommit" in how or "hand" in how) as caller:
            if "hand" in how:
                await caller.run("BEGIN")
                outcome = await caller.within("m1", add)
                await caller.run("COMMIT")
            elif "block" in how:
                async with caller.transaction():
                    outcome = await caller.within("m1", add)
            else:
                # Leaving the connection commits.
                outcome = await caller.within("m1", add)
        return outcome.replayed

    assert [worker.play(deliver), worker.play(deliver)] == [False, True]
    worker.close()
    assert (balance(url), records(url)) == (10, ["m1"])


@pytest.mark.parametrize("driver", [Psycopg, AsyncPsycopg])
def test_it_works_in_pipeline_mode(driver: type[Worker], url: str) -> None:
    worker = driver(url, source=never_opened)

    async def deliver(caller: Caller) -> list[bool]:
        outcomes = [await caller.within("m1", add), await caller.within("m2", handling(Handler("receipt")))]
        with pytest.raises(ValueError, match="no"):
            await caller.within("m3", handling(Handler(error=ValueError("no"))))
        return [outcome.replayed for outcome in outcomes]

    async def story(worker: Worker) -> list[bool]:
        async with worker.connected() as caller, caller.transaction():
            if isinstance(worker, Psycopg):
                with caller.connection.pipeline():
                    return await deliver(caller)
            async with caller.connection.pipeline():
                return await deliver(caller)

    assert worker.play(story) == [False, False]
    assert worker.play(story) == [True, True]
    worker.close()
    assert (balance(url), records(url)) == (10, ["m1", "m2"])


@asynccontextmanager
async def pipelined(caller: Caller) -> AsyncIterator[None]:
    if isinstance(caller.connection, psycopg.Connection):
        with caller.connection.pipeline():
            yield
    else:
        async with caller.connection.pipeline():
            yield


async def queue(caller: Caller, statement: str) -> None:
    """Send it in a pipeline, and do not ask for its answer."""
    sent: Any = caller.connection.execute(statement)
    if not isinstance(sent, psycopg.Cursor):
        await sent


@pytest.mark.parametrize("driver", [Psycopg, AsyncPsycopg])
def test_in_a_pipeline_where_the_server_has_not_answered_yet_a_transaction_is_not_taken_for_granted(
    driver: type[Worker], url: str
) -> None:
    worker, handler = driver(url, source=never_opened), Handler()

    async def story(worker: Worker) -> bool:
        async with worker.connected(autocommit=True) as caller, pipelined(caller):
            await queue(caller, "SELECT 1")
            with pytest.raises(NotInTransaction, match="no transaction is open"):
                await caller.within("m1", handling(handler))
            async with caller.transaction():
                await queue(caller, "SELECT 1")
                return (await caller.within("m2", add)).replayed

    assert worker.play(story) is False
    worker.close()
    assert (handler.starts, records(url), balance(url)) == (0, ["m2"], 10)


def test_a_statement_that_fails_shows_its_own_error(worker: Worker, url: str) -> None:
    async def overdraw(hand: Hand) -> None:
        await add(hand, -1)

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:
            with pytest.raises(VIOLATIONS, match="wallet_balance_check"):
                async with caller.transaction():
                    await caller.within("m1", overdraw)

    worker.play(story)

    assert records(url) == []


@pytest.mark.parametrize("looked", [False, True])
def test_a_transaction_that_has_failed_before_is_refused_in_words(worker: Worker, url: str, looked: bool) -> None:
    handler = Handler()

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:
            if looked:
                async with caller.transaction():
                    await caller.within("earlier", add)
            with suppress(UsageError):
                async with caller.transaction():
                    with pytest.raises(VIOLATIONS):
                        await add(caller, -100)
                    with pytest.raises(UsageError, match="a statement failed in this transaction before") as refused:
                        await caller.within("m1", handling(handler))
                    raise refused.value

    worker.play(story)

    assert (handler.starts, "m1" in records(url)) == (0, False)


@pytest.mark.parametrize("value", [None, "receipt"])
def test_a_handler_that_goes_on_after_a_statement_failed_is_told(worker: Worker, value: Any) -> None:
    async def swallow(hand: Hand) -> Any:
        with suppress(*VIOLATIONS):
            await add(hand, -5)
        return value

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:
            with pytest.raises(UsageError, match="a statement of the handler failed, and the handler continued"):
                async with caller.transaction():
                    await caller.within("m1", swallow)

    worker.play(story)


@pytest.mark.parametrize("value", [None, "receipt"])
@pytest.mark.parametrize("way", ["commit", "rollback"])
@pytest.mark.parametrize("driver", [Psycopg, AsyncPsycopg])
def test_a_handler_that_ends_the_transaction_by_itself_is_told(
    driver: type[Worker], url: str, way: str, value: Any
) -> None:
    worker = driver(url, source=never_opened)

    async def end(hand: Hand) -> Any:
        done = getattr(hand.connection, way)()
        if done is not None:
            await done
        return value

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:
            with pytest.raises(UsageError, match="the handler ended the transaction by itself"):
                await caller.within("m1", end)

    worker.play(story)
    worker.close()


def test_the_time_of_a_record_is_not_that_of_the_beginning_of_the_transaction(worker: Worker) -> None:
    """In a transaction that has been open for a day, `now()` would let a record expire at once."""

    async def story(worker: Worker) -> list[Any]:
        async with worker.connected() as caller, caller.transaction():
            await caller.run("SELECT pg_sleep(0.02)")
            await caller.within("m1", add)
            return await caller.run(
                "SELECT began - date_part('epoch', now()) >= 0.02, changed - date_part('epoch', now()) >= 0.02, "
                "expires - date_part('epoch', now()) >= 86400.02 FROM onefold_records"
            )

    assert worker.play(story) == [(True, True, True)]


# The tables of a database that was never used.


def test_the_first_use_makes_the_tables_beside_the_callers_transaction(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> set[str]:
        async with worker.connected() as caller:
            with suppress(RolledBack):
                async with caller.transaction():
                    await add(caller, 1)
                    await caller.within("m1", add)
                    seen = tables(url)
                    raise RolledBack
        return seen

    assert worker.play(story) == {"onefold_records", "onefold_schema"}
    assert (tables(url), balance(url), records(url)) == ({"onefold_records", "onefold_schema"}, 0, [])


def test_a_repeatable_read_that_has_begun_before_sees_the_tables(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> bool:
        async with worker.connected() as caller, caller.transaction():
            await caller.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await caller.run("SELECT * FROM wallet")
            return (await caller.within("m1", add)).replayed

    assert worker.play(story) is False
    assert (balance(url), records(url)) == (10, ["m1"])


def test_the_tables_are_made_where_the_callers_session_looks_for_them(worker: Worker, url: str) -> None:
    with another(url) as connection:
        connection.execute("CREATE SCHEMA tenant")

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller, caller.transaction():
            await caller.run("SET LOCAL search_path TO tenant, public")
            await caller.within("m1", add)

    worker.play(story)

    assert rows(url, "SELECT schemaname FROM pg_tables WHERE tablename = 'onefold_records'") == [("tenant",)]
    assert rows(url, "SELECT key FROM tenant.onefold_records") == [("m1",)]


def test_tables_that_were_dropped_are_made_for_the_next_delivery(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> bool:
        async with worker.connected() as caller:
            async with caller.transaction():
                await caller.within("m1", add)
            with another(url) as connection:
                connection.execute("DROP TABLE onefold_records, onefold_schema")
            with pytest.raises(StoreUnavailable, match="were dropped"):
                async with caller.transaction():
                    await caller.within("m2", add)
            async with caller.transaction():
                return (await caller.within("m2", add)).replayed

    assert worker.play(story) is False
    assert (balance(url), records(url)) == (20, ["m2"])


@contextmanager
def closed_to_new_connections(url: str) -> Iterator[None]:
    with another(urlsplit(url)._replace(path="/postgres").geturl()) as connection:
        change = f"ALTER DATABASE {urlsplit(url).path[1:]} ALLOW_CONNECTIONS"
        connection.execute(f"{change} false".encode())
        try:
            yield
        finally:
            connection.execute(f"{change} true".encode())


def test_where_no_second_connection_can_be_opened_the_command_is_named(worker: Worker, url: str) -> None:
    handler = Handler()

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:
            missing = pytest.raises(StoreUnavailable, match="`onefold schema --store URL --apply`")
            with closed_to_new_connections(url), missing:
                async with caller.transaction():
                    await caller.within("m1", handling(handler))

    worker.play(story)

    assert handler.starts == 0


def test_without_a_second_connection_tables_that_are_there_are_used(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> list[bool]:
        async with worker.connected() as caller:
            async with caller.transaction():
                first = await caller.within("m1", add)
            postgres_joined.looked.clear()
            with closed_to_new_connections(url):
                async with caller.transaction():
                    second = await caller.within("m1", add)
        return [first.replayed, second.replayed]

    assert worker.play(story) == [False, True]


@pytest.mark.parametrize("key", ["known", "new"])
def test_tables_of_a_newer_version_are_refused_in_one_line_and_nothing_runs(worker: Worker, url: str, key: str) -> None:
    handler = Handler()

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:
            async with caller.transaction():
                await caller.within("known", add)
            postgres_joined.looked.clear()
            await caller.run(TOO_NEW)
            if not isinstance(worker, Asyncpg):
                await caller.run("COMMIT")
            with pytest.raises(StoreUnavailable, match=REFUSED) as raised:
                async with caller.transaction():
                    await caller.within(key, handling(handler))
            assert "\n" not in str(raised.value)

    worker.play(story)

    assert handler.starts == 0


# What it costs.

COSTS: dict[str, tuple[Handler, int]] = {
    # Over asyncpg a record without a result is looked at after the handler; psycopg shows that it is there.
    "new": (Handler(None), 1),
    "new, with a result": (Handler("receipt"), 2),
    "new, and it fails": (Handler(error=ValueError()), 2),
    "known": (Handler(None), 1),
}


@pytest.mark.parametrize("case", COSTS)
def test_what_a_delivery_costs_in_statements(worker: Worker, url: str, case: str) -> None:
    handler, expected = COSTS[case]

    async def story(worker: Worker) -> Sequence[bytes]:
        async with worker.connected() as caller:
            for number in range(3):
                # Once each, so that asyncpg has them prepared.
                async with caller.transaction():
                    await caller.within("known", handling(Handler("receipt")))
                    await caller.within(f"earlier-{number}", handling(Handler("receipt")))
                    await caller.within(f"empty-{number}", handling(Handler(None)))
                    with suppress(ValueError):
                        await caller.within("failed", handling(Handler(error=ValueError())))
            async with caller.transaction():
                await caller.run("SELECT 1")
                with proxy.counting() as count, suppress(ValueError):
                    await caller.within(case.partition(",")[0], handling(handler))
                return count.messages

    with Proxy(url) as proxy:
        worker.url = proxy.url()
        messages = worker.play(story)

    looks = isinstance(worker, Asyncpg) and case == "new"
    assert len(messages) == expected + looks, messages


def test_a_process_looks_for_the_tables_of_a_database_once(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> list[int]:
        trips = []
        for number in range(2):
            async with worker.connected() as caller, caller.transaction():
                await caller.run("SELECT 1")
                with proxy.counting() as count:
                    await caller.within(f"m{number}", add)
                trips.append(count.trips)
        return trips

    with Proxy(url) as proxy:
        worker.url = proxy.url()
        first, second = worker.play(story)

    # The record, the handler's own, and a look; asyncpg prepares each statement with a message of its own.
    assert second == (6 if isinstance(worker, Asyncpg) else 3)
    assert first > second


# Guards, keys and payloads.


def test_a_policy_that_remembers_failures_is_refused(worker: Worker) -> None:
    handler = Handler()

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller, caller.transaction():
            with pytest.raises(UsageError, match="the rollback removes it"):
                await caller.within("m1", handling(handler), policy=Policy(final_errors=(ValueError,)))

    worker.play(story)

    assert handler.starts == 0


def test_the_same_key_with_another_payload_is_refused(worker: Worker) -> None:
    handler = Handler()

    async def story(worker: Worker) -> None:
        async with worker.connected() as caller, caller.transaction():
            await caller.within("m1", handling(handler), payload={"amount": 10})
            await caller.within("m1", handling(handler), payload={"amount": 10})
            with pytest.raises(KeyReused):
                await caller.within("m1", handling(handler), payload={"amount": 11})

    worker.play(story)

    assert handler.starts == 1


def test_two_tenants_may_use_the_same_key(worker: Worker) -> None:
    async def story(worker: Worker) -> list[bool]:
        async with worker.connected() as caller, caller.transaction():
            outcomes = [await caller.within("m1", add, scope=tenant) for tenant in ("north", "south", "north")]
        return [outcome.replayed for outcome in outcomes]

    assert worker.play(story) == [False, False, True]


def test_a_bypass_that_fails_leaves_what_was_done_also_if_the_caller_commits(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> Any:
        async with worker.connected() as caller:
            async with caller.transaction():
                await caller.within("m1", handling(Handler("receipt")))
            async with caller.transaction():
                with pytest.raises(ValueError, match="no"):
                    await caller.within("m1", handling(Handler(error=ValueError("no"))), bypass=True)
            async with caller.transaction():
                return await caller.within("m1", add)

    outcome = worker.play(story)

    assert (outcome.value, outcome.replayed, balance(url)) == ("receipt", True, 0)


def test_a_bypass_runs_it_once_more(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> None:
        async with worker.connected() as caller, caller.transaction():
            await caller.within("m1", add)
            await caller.within("m1", add, bypass=True)
            await caller.within("m1", add)

    worker.play(story)

    assert balance(url) == 20


def test_a_handler_that_delivers_its_own_key_is_told(worker: Worker) -> None:
    async def story(worker: Worker) -> None:
        async with worker.connected() as caller:

            async def again(_: Hand) -> None:
                await caller.within("m1", add)

            with pytest.raises(InsideItself):
                async with caller.transaction():
                    await caller.within("m1", again)

    worker.play(story)


def test_a_batch_is_sorted_out_by_one_statement(worker: Worker, url: str) -> None:
    async def story(worker: Worker) -> tuple[Any, ...]:
        async with worker.connected() as caller:
            async with caller.transaction():
                await fresh(caller, ["m1", "m3"])
            async with caller.transaction():
                await caller.run("SELECT 1")
                with proxy.counting() as count:
                    found = await fresh(caller, ["m3", "m2", "m2", "m1", "m4"])
            return list(found.new), list(found.seen), count.trips

    async def fresh(caller: Caller, messages: list[str]) -> Any:
        guard: Any = worker.guard  # type: ignore[attr-defined]
        found = guard.within(caller.connection).fresh("credit", messages, key=lambda message: message)
        return found if isinstance(guard, Guard) else await found

    with Proxy(url) as proxy:
        worker.url = proxy.url()
        new, seen, trips = worker.play(story)

    assert (new, seen, trips) == (["m2", "m4"], ["m3", "m2", "m1"], 1)
    assert records(url) == ["m1", "m2", "m3", "m4"]


# The caller's own ways.


def test_the_form_in_which_a_psycopg_caller_wants_rows_and_values_does_not_matter(url: str) -> None:
    class Shouting(psycopg.adapt.Loader):
        def load(self, data: Any) -> str:
            return bytes(data).decode().upper()

    class Refusing(psycopg.adapt.Dumper):
        def dump(self, obj: Any) -> bytes:
            raise AssertionError("the caller's dumper was used")

    with psycopg.connect(url, row_factory=dict_row, cursor_factory=psycopg.ClientCursor) as connection:
        for type_ in ("text", "bytea", "float8", "int4", "int2"):
            connection.adapters.register_loader(type_, Shouting)
        for kind in (str, bytes, float, int):
            connection.adapters.register_dumper(kind, Refusing)
        connection.prepare_threshold = 0
        outcomes = [Guard(never_opened).within(connection).run("credit", "m1", Handler("Receipt")) for _ in range(7)]

    assert [(one.replayed, one.value) for one in outcomes] == [(False, "Receipt"), *[(True, "Receipt")] * 6]


def test_the_codecs_of_an_asyncpg_caller_do_not_matter(url: str) -> None:
    class Row(asyncpg.Record):
        """A row of the caller's own class."""

    async def story(worker: Worker) -> list[Any]:
        async with worker.connected(record_class=Row) as caller:
            for type_ in ("text", "bytea", "float8", "int4", "int2"):
                await caller.connection.set_type_codec(
                    type_, schema="pg_catalog", encoder=lambda _: "9", decoder=lambda _: "shouted", format="text"
                )
            async with caller.transaction():
                outcomes = [await caller.within("m1", handling(Handler("Receipt"))) for _ in range(2)]
        return [(one.replayed, one.value) for one in outcomes]

    worker = Asyncpg(url, source=never_opened)
    assert worker.play(story) == [(False, "Receipt"), (True, "Receipt")]
    worker.close()


def test_a_connection_that_asyncpgs_pool_lends_will_do(url: str) -> None:
    async def story(worker: Worker) -> bool:
        guard = AsyncGuard(never_opened)
        async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
            async with pool.acquire() as connection, connection.transaction():
                await guard.within(connection).run("credit", "m1", Handler())
            async with pool.acquire() as connection, connection.transaction():
                outcome = await guard.within(connection).run("credit", "m1", Handler())
            with pytest.raises(UsageError, match="pass one of its connections"):
                await guard.within(pool).run("credit", "m1", Handler())
        return outcome.replayed

    worker = Asyncpg(url, source=never_opened)
    assert worker.play(story) is True
    worker.close()


def test_sync_for_async_is_refused_before_anything_runs(url: str) -> None:
    handler = Handler()

    async def wrong() -> None:
        with psycopg.connect(url) as blocking, pytest.raises(UsageError, match=r"joins a psycopg\.AsyncConnection"):
            await AsyncGuard(never_opened).within(blocking).run("credit", "m1", handler)
        async with await psycopg.AsyncConnection.connect(url) as async_one:
            with pytest.raises(UsageError, match=r"joins a psycopg\.Connection"):
                Guard(never_opened).within(async_one).run("credit", "m1", handler)
        other = await asyncpg.connect(url)
        with pytest.raises(UsageError, match="asyncpg is for an AsyncGuard"):
            Guard(never_opened).within(other).run("credit", "m1", handler)
        await other.close()

    worker = AsyncPsycopg(url, source=never_opened)
    worker.play(lambda _: wrong())
    worker.close()

    assert handler.starts == 0
