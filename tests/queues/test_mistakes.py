"""What is written wrong: refused before the first message, or told in the dead letters; never work that is lost."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from onefold import AsyncGuard, Guard, MissingKey, Policy, StoreUnavailable, UsageError, events
from onefold.queues import keys
from onefold.queues._shared.batches import Batches
from onefold.queues._shared.consumer import AsyncConsuming, Consuming
from onefold.queues._shared.options import check_transactions
from onefold.queues._shared.transactional_batches import TransactionalBatches
from onefold.queues._shared.verdict import ACK, HELD_DELAY, HandlerRaised, Later, Never, Verdict
from onefold.queues.babelqueue import wrap
from onefold.queues.keys import Message
from onefold.stores.memory import AsyncMemoryStore, MemoryStore
from onefold.stores.sqlite import SqliteStore
from tests.support import PATIENCE, ProxyStore


class OnItsWay(NamedTuple):
    message: Message
    native: str


SENT = Message(b"{}", {"idempotency-key": "pay-1"})


def handle(body: str) -> None: ...


async def handle_async(body: str) -> None: ...


def go_through(body: str) -> Any:
    yield body


async def go_through_async(body: str) -> Any:
    yield body


class Called:
    async def __call__(self, body: str) -> None: ...


def hidden(handler: Callable[..., Any]) -> Callable[..., Any]:
    """As a decorator hides it: nobody can see that it is no plain function."""

    def wrapper(body: str) -> Any:
        return handler(body)

    return wrapper


def deliver(handler: Callable[..., Any], *, sent: Message = SENT, policy: Policy | None = None) -> Verdict:
    with Guard("memory:") as guard:
        return Consuming(guard, "charge", handler, key=keys.header(), missing_key="run", policy=policy).deliver(
            sent, ""
        )


def deliver_async(handler: Callable[..., Any], *, sent: Message = SENT) -> Verdict:
    async def main() -> Verdict:
        async with AsyncGuard("memory:") as guard:
            consuming = AsyncConsuming(guard, "charge", handler, key=keys.header(), missing_key="run")
            return await consuming.deliver(sent, "")

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"key": keys.header}, r"key=header is not called: write key=header\("),
        ({"key": keys.message_id}, "key=message_id is not called"),
        ({"key": "order_id"}, r"write header\('order_id'\), or field\('order_id'\)"),
        ({"key": None}, r"header\(\), field"),
        ({"key": handle_async}, "a plain function of a message"),
        ({"operation": " "}, "a name such as 'charge'"),
        ({"operation": 7}, "a name such as 'charge'"),
        ({"operation": "o" * 1000}, "has 1000 bytes of UTF-8, and the limit is 128"),
        ({"operation": "a\0b"}, "a NUL character"),
        ({"operation": "a\ud800"}, "half of a surrogate pair"),
        ({"policy": {"keep": 1}}, "policy= has to be a Policy"),
        ({"handler": None}, "the handler has to be a function, not NoneType"),
        ({"handler": go_through}, "its work would be lost"),
        ({"handler": go_through_async}, "its work would be lost"),
        ({"handler": Called()}, "its work would be lost"),
        ({"handler": lambda: None}, "too many positional arguments"),
        ({"handler": lambda body, meta: None}, "missing a required argument: 'meta'"),
        ({"handler": lambda body, *, tx, more: None}, "missing a required argument: 'more'"),
        ({"guard": "memory:"}, "takes Guard, but this is str"),
        ({"missing_key": "skip"}, "neither 'never' nor 'run'"),
    ],
)
def test_what_would_fail_for_every_message_is_refused_before_the_first(wrong: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"guard": Guard("memory:"), "operation": "charge", "handler": handle, "key": keys.header()}
    given = right | wrong

    with pytest.raises(UsageError, match=says):
        Consuming(given.pop("guard"), given.pop("operation"), given.pop("handler"), **given)


def test_a_guard_of_sync_for_async_is_refused_and_the_right_one_named() -> None:
    def handle(message: Message) -> None: ...

    async def async_handler(message: Message) -> None: ...

    blocking: Any = Guard("memory:")
    other: Any = AsyncGuard("memory:")

    with pytest.raises(UsageError, match="this client is async: it takes AsyncGuard, but this is Guard"):
        AsyncConsuming(blocking, "charge", async_handler, key=keys.header())
    with pytest.raises(UsageError, match="this client is blocking: it takes Guard, but this is AsyncGuard"):
        Consuming(other, "charge", handle, key=keys.header())


def test_a_handler_of_whole_batches_has_to_take_the_transaction() -> None:
    with Guard("memory:") as guard, pytest.raises(UsageError, match="the handler has to take tx"):
        TransactionalBatches(guard, "credit", handle, lambda: None, key=keys.header(), missing_key="never", policy=None)  # type: ignore[arg-type,return-value]


def test_a_transaction_that_cannot_be_opened_by_with_is_raised_and_blames_no_message() -> None:
    def credit(messages: list[str], *, tx: Any) -> None: ...
    async def credit_async(messages: list[str], *, tx: Any) -> None: ...

    asked: Any = {"key": keys.header(), "missing_key": "never", "policy": None}

    async def main() -> None:
        async with AsyncGuard("memory:") as guard:
            batches = TransactionalBatches(guard, "credit", credit_async, threading.Lock, **asked)
            await batches.deliver_async([OnItsWay(SENT, "")])

    with (
        Guard("memory:") as guard,
        pytest.raises(UsageError, match="returns object, but this client opens it with `with`"),
    ):
        TransactionalBatches(guard, "credit", credit, object, **asked).deliver([OnItsWay(SENT, "")])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="this client opens it with `async with`"):
        asyncio.run(main())


@pytest.mark.parametrize("kind", [StopIteration, RuntimeError, ValueError])
def test_the_error_of_a_handler_of_whole_batches_surfaces_unchanged(kind: type[Exception], tmp_path: Path) -> None:
    def credit(messages: list[str], *, tx: Any) -> None:
        raise kind("its own") from StopIteration()

    with Guard(f"sqlite:///{tmp_path}/records.db") as guard, closing(sqlite3.connect(tmp_path / "records.db")) as tx:
        guard.run("other", "k", lambda: None)
        asked: Any = {"key": keys.header(), "missing_key": "never", "policy": None}
        (verdict,) = TransactionalBatches(guard, "credit", credit, lambda: tx, **asked).deliver([OnItsWay(SENT, "")])

    assert isinstance(verdict, HandlerRaised)
    assert (type(verdict.error), str(verdict.error)) == (kind, "its own")


@pytest.mark.parametrize("sent", [SENT, Message(b"{}", {})], ids=["guarded", "without a key"])
@pytest.mark.parametrize("late", [handle_async, go_through], ids=["coroutine", "generator"])
def test_a_forgotten_await_is_told_and_not_acknowledged(late: Callable[..., Any], sent: Message) -> None:
    async def forgets(body: str) -> Any:
        return late(body)

    for verdict in (deliver(hidden(late), sent=sent), deliver_async(forgets, sent=sent)):
        assert isinstance(verdict, Never)
        assert "which nobody would run" in verdict.reason


@pytest.mark.parametrize("sent", [SENT, Message(b"{}", {})], ids=["guarded", "without a key"])
def test_a_forgotten_await_in_a_poll_is_told_and_not_acknowledged(sent: Message) -> None:
    async def forgets(body: str) -> Any:
        return handle_async(body)

    async def main() -> list[Verdict]:
        async with AsyncGuard("memory:") as guard:
            batches = Batches(guard, "charge", forgets, key=keys.header(), missing_key="run", policy=None)
            return await batches.deliver_async([OnItsWay(sent, "")])

    with Guard("memory:") as guard:
        batches = Batches(guard, "charge", hidden(handle_async), key=keys.header(), missing_key="run", policy=None)
        (blocking,) = batches.deliver([OnItsWay(sent, "")])
    (awaiting,) = asyncio.run(main())

    assert [type(blocking), type(awaiting)] == [Never, Never]


def test_a_forgotten_await_under_babelqueue_is_raised() -> None:
    with Guard("memory:") as guard:
        wrapped = wrap(guard, lambda data, meta: handle_async(data))
        for meta in ({"id": "1"}, {}):
            with pytest.raises(UsageError, match="which nobody would run"):
                wrapped({}, meta)
        with pytest.raises(UsageError, match="its work would be lost"):
            wrap(guard, Called())


def test_what_another_guard_says_inside_the_handler_does_not_acknowledge_the_message() -> None:
    """The charge is done, and its result was not kept; the mail after it is still to be sent."""
    with Guard("memory:") as guard:

        @guard.idempotent("inner", key="key", policy=Policy(keep_result=False))
        def charge(key: str) -> int:
            return 4200

        def charge_and_mail(body: str) -> None:
            charge("pay-1")
            raise ConnectionError("the mail server is away")

        one = Consuming(guard, "order", charge_and_mail, key=keys.header())
        batches = Batches(
            guard, "order in batches", charge_and_mail, key=keys.header(), missing_key="never", policy=None
        )
        verdicts = [one.deliver(SENT, ""), one.deliver(SENT, ""), *batches.deliver([OnItsWay(SENT, "")])]

    assert [type(verdict) for verdict in verdicts] == [HandlerRaised, HandlerRaised, HandlerRaised]


@pytest.mark.parametrize("sent", [SENT, Message(b"{}", {})], ids=["guarded", "without a key"])
def test_a_failure_that_the_policy_remembers_is_not_tried_again(sent: Message) -> None:
    def decline(body: str) -> None:
        raise ValueError("card 4111 1111 1111 1111")

    policy = Policy(final_errors=(ValueError,))
    with Guard("memory:", policy=policy) as guard:
        batches = Batches(guard, "charge", decline, key=keys.header(), missing_key="never", policy=None)
        verdicts = [deliver(decline, sent=sent, policy=policy), *batches.deliver([OnItsWay(SENT, "")])]

    assert all(isinstance(verdict, Never) for verdict in verdicts)
    assert all("it failed for good with ValueError at test_mistakes.py" in str(verdict) for verdict in verdicts)
    assert "4111" not in str(verdicts)


def test_a_remembered_failure_is_named_without_its_words() -> None:
    class Declined(ValueError):
        def __init__(self, card: str, bank: str) -> None:
            super().__init__(f"{card} by {bank}")

    def decline(body: str) -> None:
        raise Declined("card 4111 1111 1111 1111", "bank")

    with Guard("memory:", policy=Policy(final_errors=(ValueError,))) as guard:
        consuming = Consuming(guard, "charge", decline, key=keys.header())
        verdicts = [consuming.deliver(SENT, "") for _ in range(2)]

    assert all(isinstance(verdict, Never) for verdict in verdicts)
    assert "Declined" in str(verdicts[1])
    assert "4111" not in str(verdicts)


def test_a_store_that_is_down_is_no_failure_that_is_remembered() -> None:
    class Down(ProxyStore):
        def claim(self, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable("not now")

    with Guard(Down(), policy=Policy(final_errors=(Exception,))) as guard:
        verdict = Consuming(guard, "charge", handle, key=keys.header()).deliver(SENT, "")

    assert isinstance(verdict, Later)


def test_a_handler_whose_inner_task_was_cancelled_does_not_end_its_consumer() -> None:
    async def waits_for_a_cancelled_task(body: str) -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    async def in_a_poll() -> list[Verdict]:
        async with AsyncGuard("memory:") as guard:
            batches = Batches(
                guard, "charge", waits_for_a_cancelled_task, key=keys.header(), missing_key="never", policy=None
            )
            return await batches.deliver_async([OnItsWay(SENT, "")])

    assert isinstance(deliver_async(waits_for_a_cancelled_task), HandlerRaised)
    assert [type(verdict) for verdict in asyncio.run(in_a_poll())] == [HandlerRaised]


def test_a_consumer_that_is_itself_cancelled_stops() -> None:
    started = asyncio.Event()

    async def wait(body: str) -> None:
        started.set()
        await asyncio.sleep(60)

    async def main() -> None:
        async with AsyncGuard("memory:") as guard:
            consuming = AsyncConsuming(guard, "charge", wait, key=keys.header())
            task = asyncio.create_task(consuming.deliver(SENT, ""))
            await asyncio.wait_for(started.wait(), PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_a_key_is_one_text_whatever_type_it_was_sent_as() -> None:
    number = uuid.uuid4()

    assert (keys.usable(number), keys.usable(7), keys.minted("k")) == (str(number), "7", "k")
    assert len({keys.minted(None) for _ in range(10)}) == 10
    with pytest.raises(MissingKey, match="digits"):
        keys.usable(10**5000)


def test_a_body_that_is_too_deep_is_no_failed_attempt() -> None:
    with pytest.raises(MissingKey, match="not JSON"):
        keys.field("id")(Message(b"[" * 100_000, {}))


def test_half_of_a_surrogate_pair_is_legal_json() -> None:
    messages = [Message(b'{"id": "k", "note": "\\ud83d%d"}' % number, {}) for number in (1, 1, 2)]
    hashes = [keys.content_hash(fields=["note"], identical_payloads_are_duplicates=True)(one) for one in messages]

    assert [keys.field("id")(one) for one in messages] == ["k", "k", "k"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_messages_without_any_field_of_a_content_hash_are_not_one_message() -> None:
    key = keys.content_hash(fields=["order", "line"], identical_payloads_are_duplicates=True)

    assert key(Message(b'{"order": 1}', {})) != key(Message(b'{"line": 1}', {}))
    with pytest.raises(MissingKey, match="none of the fields of the key: order, line"):
        key(Message(b'{"other": 1}', {}))
    with pytest.raises(UsageError, match=r"fields=\['order'\]"):
        keys.content_hash(fields="order", identical_payloads_are_duplicates=True)


def test_a_message_that_is_done_is_acknowledged_whatever_the_handler_returns() -> None:
    assert deliver(lambda body: {"a": object()}) == ACK


# The worker's mistakes, and the message's.


def with_tx(body: str, *, tx: Any) -> None: ...


async def with_tx_async(body: str, *, tx: Any) -> None: ...


def verdict_of_a_closed_guard(handler: Callable[..., Any] = handle) -> Verdict:
    guard = Guard("memory:")
    consuming = Consuming(guard, "charge", handler, key=keys.header())
    guard.close()
    return consuming.deliver(SENT, "")


def verdict_of_a_closed_async_guard() -> Verdict:
    async def main() -> Verdict:
        async with AsyncGuard("memory:") as guard:
            consuming = AsyncConsuming(guard, "charge", handle_async, key=keys.header())
        return await consuming.deliver(SENT, "")

    return asyncio.run(main())


def verdict_without_transactions(sent: Message = SENT) -> Verdict:
    # What a function will give is not known before it is called.
    with Guard(MemoryStore) as guard:
        return Consuming(guard, "charge", with_tx, key=keys.header(), missing_key="run").deliver(sent, "")


def verdict_without_transactions_async() -> Verdict:
    async def main() -> Verdict:
        async with AsyncGuard(AsyncMemoryStore) as guard:
            return await AsyncConsuming(guard, "charge", with_tx_async, key=keys.header()).deliver(SENT, "")

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("deliver", "says"),
    [
        (verdict_of_a_closed_guard, "this guard is closed"),
        (verdict_of_a_closed_async_guard, "this guard is closed"),
        (verdict_without_transactions, "MemoryStore has no transactions"),
        (verdict_without_transactions_async, "AsyncMemoryStore has no transactions"),
        (lambda: verdict_without_transactions(Message(b"{}", {})), "MemoryStore has no transactions"),
    ],
)
def test_a_worker_that_cannot_work_buries_no_message(deliver: Callable[[], Verdict], says: str) -> None:
    verdict = deliver()

    assert isinstance(verdict, Later)
    assert (verdict.delay, verdict.limited) == (HELD_DELAY, False)
    assert says in verdict.reason


def test_what_is_wrong_inside_the_handler_is_not_taken_for_the_workers_mistake() -> None:
    guard = Guard("memory:")

    def closes_the_guard(body: str) -> None:
        guard.close()
        raise UsageError("this guard is closed")

    with guard:
        verdict = Consuming(guard, "charge", closes_the_guard, key=keys.header()).deliver(SENT, "")

    assert isinstance(verdict, Never)


def test_a_payload_that_cannot_be_compared_is_the_messages_fault() -> None:
    with Guard("memory:") as guard:
        consuming = Consuming(guard, "charge", handle, key=keys.header(), payload=lambda _: object())

        assert isinstance(consuming.deliver(SENT, ""), Never)


def test_a_claim_that_was_lost_in_a_guard_that_was_closed_is_not_buried() -> None:
    class Lost(ProxyStore):
        def finish(self, *_: Any, **__: Any) -> bool:
            guard.close()
            return False

    with Guard(Lost()) as guard:
        verdict = Consuming(guard, "charge", handle, key=keys.header()).deliver(SENT, "")

    assert isinstance(verdict, Later)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("memory:", "memory has no transactions"),
        ("redis://user:secret@localhost/0", "redis has no transactions"),
        ("Valkeys+cluster://localhost", "valkeys has no transactions"),
        ("dynamodb://records?region=eu-central-1", "dynamodb has no transactions"),
        (MemoryStore(), "MemoryStore has no transactions"),
        (redis.Redis(), "redis has no transactions"),
    ],
)
def test_a_handler_with_tx_on_a_store_without_transactions_is_refused_at_once(source: Any, says: str) -> None:
    guard = Guard(source)

    with pytest.raises(UsageError, match=says) as refused:
        check_transactions(guard, with_tx)
    assert "secret" not in str(refused.value)
    check_transactions(guard, handle)


@pytest.mark.parametrize("source", ["sqlite:///app.db", "postgresql://localhost", SqliteStore, MemoryStore])
def test_a_store_that_has_transactions_or_is_not_known_yet_is_not_refused(source: Any) -> None:
    check_transactions(Guard(source), with_tx)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(events, "_warned", set())
    return lambda: [one.getMessage() for one in caplog.records if "are both this operation" in one.getMessage()]


def charge_card(message: Any) -> None: ...


def charge_account(message: Any) -> None: ...


def credit_card(message: Any, *, tx: Any) -> None: ...


def credit_account(message: Any, *, tx: Any) -> None: ...


async def charge_card_async(message: Any) -> None: ...


async def charge_account_async(message: Any) -> None: ...


def babelqueue_card(data: Any, meta: Any) -> None: ...


def babelqueue_account(data: Any, meta: Any) -> None: ...


@pytest.mark.parametrize(
    ("guarded", "guard", "first", "second"),
    [
        (Consuming, Guard, charge_card, charge_account),
        (Consuming, Guard, credit_card, credit_account),
        (Consuming, Guard, charge_card, credit_card),
        (AsyncConsuming, AsyncGuard, charge_card_async, charge_account_async),
        (wrap, Guard, babelqueue_card, babelqueue_account),
    ],
)
def test_two_handlers_of_one_operation_are_named_once(
    guarded: Any, guard: Any, first: Any, second: Any, told: Callable[[], list[str]], tmp_path: Path
) -> None:
    shared = guard(f"sqlite:///{tmp_path}/shop.db") if guard is Guard else guard(AsyncMemoryStore())

    def register(handler: Any, operation: str = "charge") -> None:
        if guarded is wrap:
            wrap(shared, handler, operation=operation)
        else:
            guarded(shared, operation, handler, key=keys.header())

    for operation in ("charge", "refund"):
        register(first, operation)
        register(first, operation)
    assert told() == []

    register(second)
    register(second)

    (line,) = told()
    named = [f"{__name__}.{one.__name__}() ({__file__}:{one.__code__.co_firstlineno})" for one in (first, second)]
    assert line.startswith(f"charge: {' and '.join(named)} are both")
