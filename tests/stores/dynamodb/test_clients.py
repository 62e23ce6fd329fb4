"""Where the DynamoDB store has its clients from: threads, processes, event loops, URLs, and what the caller brings."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from onefold import Guard, UsageError
from onefold._model import Entry, Record, State
from onefold.stores.base import Query
from onefold.stores.dynamodb import (
    LEASE_MIN,
    TABLE,
    AsyncDynamoDBStore,
    DynamoDBStore,
    adopt,
    open_async_store,
    open_store,
)
from tests.stores.dynamodb.tools import DONE, claim_of, client_options, entry, plain_client, store_of, table_of
from tests.support import PATIENCE, eventually


@pytest.fixture
def client(dynamodb_url: str) -> Iterator[Any]:
    with plain_client(dynamodb_url) as client:
        yield client


@pytest.fixture
def store(dynamodb_url: str, client: Any) -> DynamoDBStore:
    """A store whose table is there, and whose clock is known."""
    store = DynamoDBStore(table_of(dynamodb_url), client=client)
    store.now()
    return store


def read(store: DynamoDBStore, of: Entry) -> Record:
    found = store.read(of.address)
    assert found is not None
    return found


# Threads, processes, event loops.


def test_threads_share_one_client(dynamodb_url: str) -> None:
    with closing(open_store(dynamodb_url)) as store, ThreadPoolExecutor(8) as threads:
        start = threading.Barrier(8)

        def claim(number: int) -> bool:
            start.wait(PATIENCE)
            return store.claim(entry()) is None

        answers = list(threads.map(claim, range(8), timeout=PATIENCE))

    assert sum(answers) == 1


def test_a_closed_store_may_be_used_again(dynamodb_url: str) -> None:
    store, mine = open_store(dynamodb_url), entry()
    assert store.claim(mine) is None
    closed: list[str] = []
    store._clients.get().close = lambda: closed.append("closed")

    store.close()
    store.close()

    assert closed == ["closed"]
    assert store.read(mine.address) is not None
    store.close()


def ended(child: int) -> int:
    """How the process has ended; one that hangs is killed."""
    status: list[int] = []

    def is_over() -> bool:
        found, how = os.waitpid(child, os.WNOHANG)
        status.extend([how] if found else [])
        return bool(found)

    if not eventually(is_over):
        os.kill(child, signal.SIGKILL)
        status.append(os.waitpid(child, 0)[1])
    return os.waitstatus_to_exitcode(status[0])


# From Python 3.12 on, a thread that another test has left behind would be a warning here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_a_client_of_its_own(dynamodb_url: str) -> None:
    with closing(open_store(dynamodb_url)) as store:
        mine = entry()
        store.claim(mine)
        parents = store._clients.get()

        child = os.fork()
        if child == 0:
            # Whatever happens here, it is not to go on as a second session of tests.
            try:
                own = store._clients.get() is not parents
                ok = own and store.finish(claim_of(mine), DONE)
                store.close()
            except BaseException:
                ok = False
            os._exit(0 if ok else 1)

        assert ended(child) == 0
        assert store._clients.get() is parents
        assert read(store, mine).state is State.DONE


def test_an_async_store_survives_one_event_loop_after_another(dynamodb_url: str) -> None:
    store, mine = open_async_store(dynamodb_url), entry()

    # Nobody closes anything: what belongs to a loop is closed with it, and warnings are errors here.
    assert asyncio.run(store.claim(mine)) is None
    assert asyncio.run(store.finish(claim_of(mine), DONE)) is True
    found = asyncio.run(store.read(mine.address))
    gc.collect()

    assert found is not None
    assert found.state is State.DONE


def test_tasks_that_start_together_share_one_client(dynamodb_url: str) -> None:
    async def race() -> list[Any]:
        store = open_async_store(dynamodb_url)
        answers = await asyncio.gather(*(store.claim(entry()) for _ in range(8)))
        assert len(store._clients._homes) == 1  # type: ignore[attr-defined]
        await store.aclose()
        return answers

    assert asyncio.run(race()).count(None) == 1


def test_a_closed_async_store_may_be_used_again(dynamodb_url: str) -> None:
    async def use() -> Record | None:
        store, mine = open_async_store(dynamodb_url), entry()
        assert await store.claim(mine) is None
        await store.aclose()
        await store.aclose()
        found = await store.read(mine.address)
        await store.aclose()
        return found

    assert asyncio.run(use()) is not None


def test_a_cancelled_operation_leaves_the_store_usable(dynamodb_url: str) -> None:
    async def cancel() -> Record | Any:
        store = open_async_store(dynamodb_url)
        for pause in (0.0, 0.001, 0.01, 0.05):
            task = asyncio.create_task(store.claim(entry()))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.wait([task])
        answer = await store.claim(entry("another"))
        await store.aclose()
        return answer

    assert asyncio.run(cancel()) is None


def _zombie(url: str, clock: Any, mine: Entry, told: Any) -> None:
    store = store_of(url, clock=lambda: float(clock.value))
    told.send(store.claim(mine) is None)
    told.recv()
    told.send((store.extend(claim_of(mine)), store.finish(claim_of(mine), DONE), store.release(claim_of(mine))))
    store.close()


def test_a_zombie_in_another_process_is_refused(dynamodb_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    clock, (here, there) = context.Value("d", time.time()), context.Pipe()
    mine, theirs = entry(lease=LEASE_MIN), entry()
    process = context.Process(target=_zombie, args=(dynamodb_url, clock, mine, there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(PATIENCE)
        assert here.recv() is True
        with closing(store_of(dynamodb_url, clock=lambda: clock.value)) as store:
            clock.value += LEASE_MIN + 1
            shown = store.claim(theirs)
            assert isinstance(shown, Record)
            assert shown.lease_left <= 0
            assert store.claim(theirs, replacing=shown) is None
            before = read(store, theirs)

            here.send("go on")

            assert here.poll(PATIENCE)
            assert here.recv() == (False, False, False)
            after = read(store, theirs)
            assert (after.token, after.state, after.revision) == (before.token, before.state, before.revision)
        process.join(PATIENCE)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        here.close()


# What the caller brings.


def test_a_client_of_the_callers_is_used_and_not_closed(store: DynamoDBStore, client: Any) -> None:
    store.claim(entry())
    store.close()

    assert client.describe_table(TableName=store.table)["Table"]["ItemCount"] >= 0


def test_a_client_is_adopted_with_the_usual_table(client: Any) -> None:
    with Guard(client) as guard:
        assert (type(guard.store), guard.store.table) == (DynamoDBStore, TABLE)


def test_a_table_of_a_resource_is_adopted_with_its_name(dynamodb_url: str) -> None:
    import boto3

    options: Any = client_options(dynamodb_url)
    resource = boto3.resource("dynamodb", **options)
    table = resource.Table(table_of(dynamodb_url))
    with Guard(table) as guard:
        assert guard.store.table == table.name
        assert guard.run("charge", "key", lambda: b"\0\xff").value == b"\0\xff"
        assert guard.run("charge", "key", lambda: b"").value == b"\0\xff"
        running = entry("running", attempt=3, omitted=True, notes=b"notes", fingerprint=b"payload", remark="remark")
        assert guard.store.claim(running) is None
        assert guard.store.extend(claim_of(running), b"notes, and more") is True

        found = read(guard.store, running)
        assert (found.attempt, found.omitted, found.notes, found.remark) == (3, True, b"notes, and more", "remark")
        assert (type(found.token), found.token) == (bytes, running.token)
        assert [record.address.key for record in guard.store.browse(Query(), 10)] == ["key", "running"]
        assert guard.store.release(claim_of(running)) is True
        assert guard.store.purge(10) == 0
    # It is still the caller's, in the form that the caller knows.
    assert table.scan()["Items"][0]["state"] == "done"


def test_sessions_make_clients_that_the_store_closes(dynamodb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from aiobotocore.session import AioSession
    from botocore.session import Session

    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", client_options(dynamodb_url)["endpoint_url"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", client_options(dynamodb_url)["region_name"])
    for session in (boto3.Session(), Session()):
        with closing(DynamoDBStore(table_of(dynamodb_url), client=session)) as store:
            assert store.claim(entry(os.urandom(4).hex())) is None
        assert store._clients._client is None  # type: ignore[attr-defined]

    async def use() -> Any:
        async_store = AsyncDynamoDBStore(table_of(dynamodb_url), client=AioSession())
        answer = await async_store.claim(entry("async"))
        await async_store.aclose()
        return answer

    assert asyncio.run(use()) is None


def test_an_async_client_of_the_callers_is_used_and_not_closed(dynamodb_url: str) -> None:
    from aiobotocore.session import AioSession

    async def use() -> tuple[Any, int]:
        async with AioSession().create_client("dynamodb", **client_options(dynamodb_url)) as client:
            store = AsyncDynamoDBStore(table_of(dynamodb_url), client=client)
            answer = await store.claim(entry())
            await store.aclose()
            described = await client.describe_table(TableName=store.table)
            return answer, described["Table"]["ItemCount"]

    assert asyncio.run(use()) == (None, 1)


def test_sync_for_async_is_refused(client: Any) -> None:
    import boto3
    from aiobotocore.session import AioSession

    with pytest.raises(UsageError, match="is sync, but this is an AsyncGuard"):
        adopt(client, is_async=True)
    with pytest.raises(UsageError, match="is sync, but this is an AsyncGuard"):
        adopt(boto3.Session(region_name="eu-west-1"), is_async=True)
    with pytest.raises(UsageError, match="is async, but this is a Guard"):
        adopt(AioSession(), is_async=False)


def test_a_client_of_another_service_is_refused(dynamodb_url: str) -> None:
    import boto3

    with pytest.raises(UsageError, match="is not of DynamoDB"):
        adopt(boto3.client("s3", region_name="eu-west-1"), is_async=False)
    with pytest.raises(UsageError, match="is not of DynamoDB"):
        adopt(boto3.resource("s3", region_name="eu-west-1"), is_async=False)


# URLs.


def test_a_url_names_the_table_and_its_options() -> None:
    store = open_store(
        "dynamodb://records.v1?region=eu-west-1&endpoint_url=http://127.0.0.1:1&timeout=5s&auto_schema=false"
    )

    assert store.table == "records.v1"
    assert store._records.create is None
    assert open_store("dynamodb://").table == TABLE
    assert repr(open_async_store("dynamodb://")) == "AsyncDynamoDBStore('onefold_records')"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("dynamodb://records?regoin=eu-west-1", "'regoin' is not one of .*: did you mean 'region'"),
        ("dynamodb://records?endpoint=http://x", "did you mean 'endpoint_url'"),
        ("dynamodb://records/more", "nothing between the table and its options"),
        ("dynamodb://records?auto_schema=perhaps", "auto_schema='perhaps' has to be yes or no"),
        ("dynamodb://records?timeout=soon", "timeout='soon' is not a duration"),
        ("dynamodb://records?timeout=forever", "timeout"),
        ("dynamodb://a:b", "has to have 3 to 255"),
        ("dynamodb://no", "has to have 3 to 255"),
    ],
)
def test_a_url_that_is_not_understood_is_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_store(url)
    with pytest.raises(UsageError, match=message):
        open_async_store(url)


@pytest.mark.parametrize(
    "url", ["dynamodb://AKIA:hush@records", "dynamodb://records?aws_secret_access_key=hush", "dynamodb://x@hush/y"]
)
def test_a_secret_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_store(url)

    assert "hush" not in str(refused.value)
