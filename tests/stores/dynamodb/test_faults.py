"""The DynamoDB store when something goes wrong: lost replies, conflicts, refusals, no server, a strange clock."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, OnefoldError, StoreUnavailable, UsageError
from onefold._model import Record, Released, State
from onefold.stores.base import Query
from onefold.stores.dynamodb import DynamoDBStore, open_async_store, open_store
from onefold.stores.dynamodb.errors import MISCONFIGURED, PROBLEMS, UNANSWERED, unanswered
from onefold.stores.dynamodb.records import CONFLICT_PAUSES
from services.processes import HOST
from services.proxy import Proxy
from tests.stores.dynamodb.tools import DONE, Line, answered, claim_of, counted, entry, plain_client, table_of


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' own pauses between attempts are random, and up to two seconds long."""
    from botocore.retries.standard import ExponentialBackoff

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda _self, _context: 0.0)


@pytest.fixture
def proxy(dynamodb_url: str) -> Iterator[Proxy]:
    with Proxy(dynamodb_url) as proxy:
        yield proxy


@pytest.fixture
def hasty(dynamodb_url: str) -> Iterator[Any]:
    """A client that sends everything once."""
    with plain_client(dynamodb_url, attempts=1) as client:
        yield client


@pytest.fixture
def store(dynamodb_url: str, hasty: Any) -> DynamoDBStore:
    store = DynamoDBStore(table_of(dynamodb_url), client=hasty)
    store.now()
    return store


def one_line(refused: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(refused.value)
    assert "\n" not in message
    return message


def unclaimed(store: DynamoDBStore) -> None:
    """Nothing was written."""
    assert store.browse(Query(), 10) == []


# The reply to each operation is lost once. The client sends it again, and it meets what it did before.


def test_an_operation_whose_reply_was_lost_is_answered_as_if_it_was_not(proxy: Proxy) -> None:
    with closing(open_store(proxy.url())) as store:
        mine, successor = entry(), entry()
        claim = claim_of(mine)
        store.now()

        def lost(ask: Any, *args: Any, **options: Any) -> Any:
            fault = proxy.lose_reply()
            answer = ask(*args, **options)
            assert fault.reached.is_set()
            return answer

        assert lost(store.claim, mine) is None
        assert lost(store.extend, claim, b"notes") is True
        assert lost(store.read, mine.address).notes == b"notes"
        assert lost(store.release, claim, Released(ttl=60.0, attempt=2)) is True
        seen = lost(store.read, mine.address)
        assert lost(store.claim, successor, replacing=seen) is None
        assert isinstance(lost(store.claim, entry()), Record)
        assert lost(store.finish, claim_of(successor), DONE) is True
        assert lost(store.browse, Query(), 10)[0].state is State.DONE
        assert lost(store.release, claim_of(successor)) is True
        assert lost(store.purge, 10) == 0
        assert store.read(mine.address) is None


def test_an_async_operation_whose_reply_was_lost_is_answered_as_if_it_was_not(proxy: Proxy) -> None:
    async def lose_each() -> None:
        store = open_async_store(proxy.url())
        mine, successor = entry(), entry()
        claim = claim_of(mine)
        await store.now()

        async def lost(ask: Any, *args: Any, **options: Any) -> Any:
            fault = proxy.lose_reply()
            answer = await ask(*args, **options)
            assert fault.reached.is_set()
            return answer

        assert await lost(store.claim, mine) is None
        assert await lost(store.extend, claim, b"notes") is True
        assert (await lost(store.read, mine.address)).notes == b"notes"
        assert await lost(store.release, claim, Released(ttl=60.0, attempt=2)) is True
        seen = await lost(store.read, mine.address)
        assert await lost(store.claim, successor, replacing=seen) is None
        assert await lost(store.finish, claim_of(successor), DONE) is True
        assert (await lost(store.browse, Query(), 10))[0].state is State.DONE
        assert await lost(store.release, claim_of(successor)) is True
        assert await lost(store.purge, 10) == 0
        await store.aclose()

    asyncio.run(lose_each())


def test_the_reply_to_the_first_use_may_be_lost_too(proxy: Proxy) -> None:
    proxy.cut_after(b"CreateTable")
    proxy.cut_after(b"UpdateTimeToLive")

    with closing(open_store(proxy.url())) as store:
        assert store.claim(entry()) is None


def test_a_guard_runs_once_though_every_reply_gets_lost_once(proxy: Proxy) -> None:
    ran: list[int] = []
    with Guard(proxy.url()) as guard:
        guard.store.now()
        faults = [proxy.cut_after(b"PutItem"), proxy.cut_after(b"UpdateItem")]

        first = guard.run("charge", "key", lambda: ran.append(1))
        second = guard.run("charge", "key", lambda: ran.append(2))

    assert all(fault.reached.is_set() for fault in faults)
    assert (first.replayed, second.replayed, ran) == (False, True, [1])


def test_a_claim_that_was_never_answered_is_disowned_and_runs_with_the_next_delivery(
    proxy: Proxy, dynamodb_url: str
) -> None:
    ran: list[int] = []
    with plain_client(proxy.url(), attempts=1) as client:
        store = DynamoDBStore(table_of(dynamodb_url), client=client)
        store.now()
        with Guard(store) as guard:
            proxy.cut_after(b"PutItem")
            with pytest.raises(StoreUnavailable) as refused:
                guard.run("charge", "key", lambda: ran.append(1))
            assert ran == []

            assert guard.run("charge", "key", lambda: ran.append(2)).replayed is False

    assert "the connection was lost before the answer came" in one_line(refused)
    assert ran == [2]


def test_a_server_that_does_not_answer_is_not_waited_for_without_end(proxy: Proxy) -> None:
    url = proxy.url() + "&timeout=0.2s"

    async def asked() -> None:
        store = open_async_store(url)
        try:
            await store.claim(entry())
        finally:
            await store.aclose()

    # For far longer than anybody waits here: in the end what was sent would be answered.
    proxy.stall()
    with closing(open_store(url)) as store, pytest.raises(StoreUnavailable) as refused:
        store.claim(entry())
    with pytest.raises(StoreUnavailable) as refused_too:
        asyncio.run(asked())
    proxy.resume()

    for told in (refused, refused_too):
        assert "did not answer in time" in one_line(told)


# What DynamoDB may answer.


@pytest.mark.parametrize("code", ["TransactionConflictException", "ReplicatedWriteConflictException"])
def test_a_conflict_with_a_transaction_is_waited_out(store: DynamoDBStore, hasty: Any, code: str) -> None:
    mine = entry()
    for action in ("PutItem", "UpdateItem", "DeleteItem"):
        answered(hasty, action, [code] * 2)
    sent = counted(hasty)

    assert store.claim(mine) is None
    assert store.finish(claim_of(mine), DONE) is True
    assert store.release(claim_of(mine)) is True

    assert sent == ["PutItem"] * 3 + ["UpdateItem"] * 3 + ["DeleteItem"] * 3


def test_a_conflict_that_does_not_end_is_told(store: DynamoDBStore, hasty: Any) -> None:
    answered(hasty, "PutItem", ["TransactionConflictException"] * (len(CONFLICT_PAUSES) + 1))
    sent = counted(hasty)

    with pytest.raises(StoreUnavailable) as refused:
        store.claim(entry())

    assert "kept finding another transaction on the record" in one_line(refused)
    assert len(sent) == len(CONFLICT_PAUSES) + 1
    assert sum(CONFLICT_PAUSES) < 5
    unclaimed(store)


def test_an_async_store_waits_conflicts_out_too(dynamodb_url: str) -> None:
    async def claim() -> Any:
        store = open_async_store(dynamodb_url)
        await store.now()
        answered(await store._clients.get(), "PutItem", ["TransactionConflictException"] * 2)
        answer = await store.claim(entry())
        await store.aclose()
        return answer

    assert asyncio.run(claim()) is None


@pytest.mark.parametrize("code", ["ThrottlingException", "ProvisionedThroughputExceededException"])
def test_what_is_throttled_is_sent_again(dynamodb_url: str, code: str) -> None:
    with closing(open_store(f"{dynamodb_url}&timeout=60s")) as store:
        store.now()
        client = store._clients.get()
        answered(client, "PutItem", [code])
        sent = counted(client)

        assert store.claim(entry()) is None

        assert sent == ["PutItem"] * 2


@pytest.mark.parametrize("code", sorted(PROBLEMS))
def test_each_refusal_is_one_clear_line_and_nothing_runs(store: DynamoDBStore, hasty: Any, code: str) -> None:
    answered(hasty, "PutItem", [code] * 9)
    answered(hasty, "DeleteItem", [code] * 9)

    with Guard(store) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "pay_7f3a", lambda: pytest.fail("it ran"))

    message = PROBLEMS[code].format(action="PutItem")
    assert one_line(refused) == f"DynamoDB table {store.table}: {message}"
    assert refused.value.__cause__ is not None
    assert "pay_7f3a" not in str(refused.value)


def test_a_refusal_that_nobody_knows_is_named(store: DynamoDBStore, hasty: Any) -> None:
    answered(hasty, "GetItem", ["SomethingNewException"])

    with pytest.raises(StoreUnavailable, match="refuses GetItem with SomethingNewException"):
        store.read(entry().address)


def test_an_endpoint_that_does_not_show_what_is_in_the_way_is_told(store: DynamoDBStore, hasty: Any) -> None:
    answered(hasty, "PutItem", ["ConditionalCheckFailedException"])

    with pytest.raises(StoreUnavailable, match="without the existing item"):
        store.claim(entry())


def test_a_table_that_vanishes_is_told_and_made_again(store: DynamoDBStore, hasty: Any) -> None:
    hasty.delete_table(TableName=store.table)

    with pytest.raises(
        StoreUnavailable, match=r"there is no such table any more\. .*`onefold schema --store URL --apply`"
    ):
        store.claim(entry())

    assert store.claim(entry()) is None


# What a client reports without an answer.


@pytest.fixture
def port_of_nobody() -> Iterator[int]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield taken.getsockname()[1]


@pytest.mark.usefixtures("dynamodb_url")
def test_an_absent_server_is_one_clear_line_and_nothing_runs(port_of_nobody: int) -> None:
    url = f"dynamodb://records?region=eu-central-1&endpoint_url=http://{HOST}:{port_of_nobody}"

    with Guard(url) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "key", lambda: pytest.fail("it ran"))

    assert one_line(refused) == (
        "DynamoDB table records: the endpoint cannot be reached. Check region=, endpoint_url= and the network"
    )

    async def run() -> None:
        async with AsyncGuard(url) as guard:
            await guard.run("charge", "key", lambda: pytest.fail("it ran"))

    with pytest.raises(StoreUnavailable, match="the endpoint cannot be reached"):
        asyncio.run(run())


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine on which nobody has configured anything."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


ELSEWHERE = "http://127.0.0.1:9"


def told_of(url: str) -> tuple[OnefoldError, OnefoldError]:
    """What a sync and an async store say."""

    async def claim() -> None:
        store = open_async_store(url)
        try:
            await store.claim(entry())
        finally:
            await store.aclose()

    with closing(open_store(url)) as store, pytest.raises(OnefoldError) as refused:
        store.claim(entry())
    with pytest.raises(OnefoldError) as refused_too:
        asyncio.run(claim())
    return refused.value, refused_too.value


@pytest.mark.usefixtures("bare")
def test_missing_credentials_are_told() -> None:
    for told in told_of(f"dynamodb://records?region=eu-central-1&endpoint_url={ELSEWHERE}"):
        assert type(told) is StoreUnavailable
        assert "no credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(told)


def test_half_of_the_credentials_are_told(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("AWS_ACCESS_KEY_ID", "AKIAHUSH")

    for told in told_of(f"dynamodb://records?region=eu-central-1&endpoint_url={ELSEWHERE}"):
        assert "a key without its secret" in str(told)
        assert "AKIAHUSH" not in str(told)


@pytest.mark.usefixtures("bare")
def test_a_missing_region_is_told() -> None:
    for told in told_of("dynamodb://records"):
        assert type(told) is UsageError
        assert "no region is known. Name it with region=" in str(told)


@pytest.mark.usefixtures("bare")
def test_a_region_that_is_none_is_told() -> None:
    for told in told_of("dynamodb://records?region=eu/central"):
        assert type(told) is UsageError
        assert "region= is not the name of a region" in str(told)


@pytest.mark.usefixtures("bare")
def test_a_missing_profile_is_told() -> None:
    for told in told_of("dynamodb://records?region=eu-central-1&profile=nobody"):
        assert type(told) is UsageError
        assert "there is no such profile" in str(told)


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://host", "http://", "https://user:hush@host"])
def test_an_endpoint_that_is_no_url_is_told(endpoint: str) -> None:
    for opened in (open_store, open_async_store):
        with pytest.raises(UsageError, match="endpoint_url= has to be a URL such as") as refused:
            opened(f"dynamodb://records?region=eu-central-1&endpoint_url={endpoint}")
        assert "hush" not in str(refused.value)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("botocore.session", "aiobotocore.session"):
        monkeypatch.setitem(sys.modules, module, None)

    for told in told_of("dynamodb://records?region=eu-central-1"):
        assert type(told) is UsageError
        assert "pip install 'onefold[dynamodb]'" in str(told)


def test_every_error_class_that_is_named_exists() -> None:
    import botocore.exceptions

    missing = [name for name in (*UNANSWERED, *MISCONFIGURED) if not hasattr(botocore.exceptions, name)]

    assert missing == []


def test_an_error_that_is_not_about_dynamodb_is_left_alone(store: DynamoDBStore, hasty: Any) -> None:
    def surprise(**_: Any) -> None:
        raise KeyError("a hook of the user's own")

    hasty.meta.events.register("before-call.dynamodb.GetItem", surprise)

    with pytest.raises(KeyError, match="a hook of the user's own"):
        store.read(entry().address)
    assert unanswered(KeyError("any"), "records") is None


# A strange clock.


def test_replies_without_a_date_are_refused_and_nothing_runs(dynamodb_url: str, hasty: Any) -> None:
    Line(hasty).skew = None
    store = DynamoDBStore(table_of(dynamodb_url), client=hasty)

    with Guard(store) as guard, pytest.raises(StoreUnavailable) as refused:
        guard.run("charge", "key", lambda: pytest.fail("it ran"))

    assert "the replies have no Date, without which there is no clock" in one_line(refused)


def test_a_date_that_runs_away_is_refused(store: DynamoDBStore, hasty: Any) -> None:
    line, mine = Line(hasty), entry("mine")
    store.claim(mine)

    def run_away(**_: Any) -> None:
        assert line.skew is not None
        line.skew += 1_000.0

    hasty.meta.events.register("before-call.dynamodb", run_away)

    with pytest.raises(StoreUnavailable, match="the Date of its replies jumps back and forth"):
        store.claim(entry())
    with pytest.raises(StoreUnavailable, match="the Date of its replies jumps back and forth"):
        store.finish(claim_of(mine), DONE)
