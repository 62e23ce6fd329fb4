"""What becomes of a message: one verdict for every error, every kind of key, and every handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    AsyncGuard,
    Guard,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    Policy,
    StoreUnavailable,
    UsageError,
)
from onefold._model import Address
from onefold.errors import MEANINGS
from onefold.queues import keys
from onefold.queues._shared.consumer import AsyncConsuming, Consuming
from onefold.queues._shared.verdict import (
    ACK,
    HELD_DELAY,
    HELD_MAX,
    SOON,
    Ack,
    HandlerRaised,
    Later,
    Never,
    Verdict,
    of_error,
    of_state,
)
from onefold.queues.keys import Message
from tests.support import ProxyStore

ADDRESS = Address("", "charge", "secret-key")


def message(body: bytes = b"{}", **parts: Any) -> Message:
    return Message(body, **({"headers": {"idempotency-key": "key"}} | parts))


# The table.


@pytest.mark.parametrize("kind", sorted(MEANINGS, key=str))
def test_every_error_of_ours_has_a_verdict_and_tells_no_key(kind: type[Any]) -> None:
    facts = {"remark": "why", "retry_after": 1.0, "type_name": "T", "message": "m", "expected": "e", "problem": "p"}
    facts |= {"attempt": 1}
    error = kind.about(ADDRESS, **facts) if hasattr(kind, "about") else kind("words")

    verdict = of_error(error, own=("charge", "secret-key"))

    expected = {"ack": Ack, "later": Later, "never": Never, "by policy": Never, "read once": type(None)}
    expected["later or never"] = Never
    assert type(verdict) is expected.get(MEANINGS[kind].queue, HandlerRaised)
    assert "secret-key" not in str(verdict)


def test_before_its_handler_has_begun_a_message_is_not_to_blame_for_a_usage_error() -> None:
    mistakes = [kind for kind in MEANINGS if isinstance(of_error(kind("words")), Never)]
    later = [kind for kind in mistakes if isinstance(of_error(kind("words"), begun=False), Later)]

    assert later == [UsageError]


def test_the_handlers_own_error_is_left_to_the_broker() -> None:
    error = ValueError("no such account")

    assert of_error(error) == HandlerRaised(error)


def test_a_running_duplicate_comes_later_and_never_in_a_hot_loop() -> None:
    soon, late = (of_error(InProgress.about(ADDRESS, retry_after=wait)) for wait in (0.01, 7.0))

    assert isinstance(soon, Later)
    assert isinstance(late, Later)
    assert (soon.delay, late.delay) == (SOON, 7.0)


def test_what_is_held_comes_a_bounded_number_of_times_and_then_never() -> None:
    held = of_error(Held.about(ADDRESS, remark="why"))

    assert isinstance(held, Later)
    assert (held.delay, held.limited) == (HELD_DELAY, True)
    assert isinstance(of_error(Held.about(ADDRESS, remark="why"), held_before=HELD_MAX), Never)


def test_after_a_lost_claim_only_what_is_done_is_acknowledged() -> None:
    assert of_state("done") == ACK
    assert all(isinstance(of_state(state), Later) for state in (None, "running", "held", "open", "failed"))


# Keys.


@pytest.mark.parametrize(
    ("key", "sent", "found"),
    [
        (keys.header(), message(), "key"),
        (keys.header(), message(headers={"idempotency-key": b"bytes"}), "bytes"),
        (keys.header("x-id"), message(headers={"x-id": 17}), 17),
        (keys.header(), message(headers={}), None),
        (keys.message_id(), message(message_id="m-1"), "m-1"),
        (keys.field("id"), message(b'{"id": "evt_1"}'), "evt_1"),
        (keys.field("event.id"), message(b'{"event": {"id": 7}}'), 7),
        (keys.field("id"), message(b'{"other": 1}'), None),
        (keys.field("id"), message(b"[1]"), None),
        (keys.first_of(keys.header("x"), keys.message_id()), message(message_id="m-1"), "m-1"),
    ],
)
def test_a_key_is_found_where_the_sender_put_it(key: keys.KeyOf, sent: Message, found: object) -> None:
    assert key(sent) == found


@pytest.mark.parametrize("found", [True, 1.5, "", "  ", "k" * 256, "k" * (1 << 20), {"a": 1}, [1], b"bytes"])
def test_what_cannot_be_a_key_is_said_in_words(found: object) -> None:
    with pytest.raises(MissingKey, match="key"):
        keys.usable(found)


@pytest.mark.parametrize(
    ("key", "sent", "says"),
    [
        (keys.field("id"), message(b"not json"), "not JSON"),
        (keys.header(), message(headers={"idempotency-key": b"\xff\xfe"}), "not text"),
        (keys.header(), message(headers={"idempotency-key": {"a": 1}}), "dict"),
        (keys.header(), message(headers={"idempotency-key": "k" * (1 << 20)}), "1048576 characters"),
        (keys.header(), message(headers={}), "no key"),
    ],
)
def test_bad_input_goes_to_the_dead_letters_with_its_reason_and_the_consumer_lives_on(
    key: keys.KeyOf, sent: Message, says: str
) -> None:
    with Guard("memory:") as guard:
        consuming = Consuming(guard, "charge", lambda _: pytest.fail("it ran"), key=key)

        verdict = consuming.deliver(sent, "body")

    assert isinstance(verdict, Never)
    assert says in verdict.reason


def test_a_position_works_only_when_it_is_meant_and_warns() -> None:
    with pytest.raises(UsageError, match="changes_when_a_producer_retries=True"):
        keys.position()
    with pytest.warns(UserWarning, match="made by the producer"):
        key = keys.position(changes_when_a_producer_retries=True)

    assert key(message(position="topic/0/17")) == "topic/0/17"


def test_a_content_hash_has_to_be_meant() -> None:
    with pytest.raises(UsageError, match="identical_payloads_are_duplicates=True"):
        keys.content_hash()
    whole = keys.content_hash(identical_payloads_are_duplicates=True)
    some = keys.content_hash(fields=["order"], identical_payloads_are_duplicates=True)

    assert whole(message(b"a")) != whole(message(b"b"))
    assert some(message(b'{"order": 1, "sent": 2}')) == some(message(b'{"sent": 3, "order": 1}'))
    assert some(message(b'{"order": 1}')) != some(message(b'{"order": 2}'))


def test_no_verdict_is_false() -> None:
    assert all((ACK, Later(1.0, ""), Never(""), HandlerRaised(ValueError())))


# Deliveries, sync and async.

Deliver = Callable[..., Verdict]


class Environment:
    """A sync or async consumer on one store, and how often its handler ran."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self.runs = 0
        self.error: Exception | None = None
        self.store: Any = None

    def handle(self, body: str) -> None:
        self.runs += 1
        if self.error is not None:
            raise self.error

    async def handle_async(self, body: str) -> None:
        await asyncio.sleep(0)
        self.handle(body)

    def deliver(self, sent: Message | None = None, source: Any = "memory:", **options: Any) -> list[Verdict]:
        """Twice, to one consumer."""
        sent = message() if sent is None else sent
        options = {"key": keys.header()} | options
        if not self.is_async:
            with Guard(source) as guard:
                consuming = Consuming(guard, "charge", self.handle, **options)
                return [consuming.deliver(sent, "body") for _ in range(2)]

        async def main() -> list[Verdict]:
            async with AsyncGuard(source) as guard:
                consuming = AsyncConsuming(guard, "charge", self.handle_async, **options)
                return [await consuming.deliver(sent, "body") for _ in range(2)]

        return asyncio.run(main())


@pytest.fixture(params=[False, True], ids=["blocking", "awaiting"])
def environment(request: pytest.FixtureRequest) -> Environment:
    return Environment(is_async=request.param)


def test_a_duplicate_of_a_finished_message_is_acknowledged_and_not_run(environment: Environment) -> None:
    assert environment.deliver() == [ACK, ACK]
    assert environment.runs == 1


def test_a_handler_that_fails_is_left_to_the_broker_and_runs_again(environment: Environment) -> None:
    environment.error = ValueError("no")

    assert environment.deliver() == [HandlerRaised(environment.error), HandlerRaised(environment.error)]
    assert environment.runs == 2


def test_a_message_without_a_key_follows_the_policy(environment: Environment) -> None:
    refused = environment.deliver(message(headers={}))
    ran_before = environment.runs
    run = environment.deliver(message(headers={}), missing_key="run")

    assert [type(one) for one in refused] == [Never, Never]
    assert ran_before == 0
    assert run == [ACK, ACK]
    assert environment.runs == 2


def test_a_message_without_a_key_gets_its_transaction_all_the_same(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    ran: list[Any] = []

    def handle(body: str, *, tx: Any) -> None:
        ran.append(tx.execute("SELECT 1").fetchone())

    async def handle_async(body: str, *, tx: Any) -> None:
        handle(body, tx=tx)

    async def main() -> list[Verdict]:
        async with AsyncGuard(url) as guard:
            consuming = AsyncConsuming(guard, "charge", handle_async, key=keys.header(), missing_key="run")
            return [await consuming.deliver(message(headers={}), "body") for _ in range(2)]

    with Guard(url) as guard:
        consuming = Consuming(guard, "charge", handle, key=keys.header(), missing_key="run")
        blocking = [consuming.deliver(message(headers={}), "body") for _ in range(2)]

    assert blocking == [ACK, ACK]
    assert asyncio.run(main()) == [ACK, ACK]
    assert len(ran) == 4


@pytest.mark.parametrize("with_tx", [False, True], ids=["claim", "transactional"])
def test_a_used_key_with_another_body_goes_to_the_dead_letters_where_bodies_are_compared(
    with_tx: bool, tmp_path: Path
) -> None:
    ran: list[str] = []

    def handle(body: str) -> None:
        ran.append(body)

    def handle_tx(body: str, *, tx: Any) -> None:
        ran.append(body)

    async def handle_async(body: str) -> None:
        ran.append(body)

    first, other = message(body=b"10 EUR"), message(body=b"99 EUR")
    with Guard(f"sqlite:///{tmp_path}/shop.db") as guard:
        handler = handle_tx if with_tx else handle
        consuming = Consuming(guard, "charge", handler, key=keys.header(), payload=keys.body())
        verdicts = [consuming.deliver(sent, "body") for sent in (first, first, other)]

    async def main() -> list[Verdict]:
        async with AsyncGuard("memory:") as guard:
            consuming = AsyncConsuming(guard, "charge", handle_async, key=keys.header(), payload=keys.body())
            return [await consuming.deliver(sent, "body") for sent in (first, first, other)]

    for found in (verdicts, asyncio.run(main())):
        assert found[:2] == [ACK, ACK]
        assert isinstance(found[2], Never)
        assert "another payload" in found[2].reason
    assert ran == ["body", "body"]


def test_without_a_payload_bodies_are_not_compared() -> None:
    with Guard("memory:") as guard:
        consuming = Consuming(guard, "charge", lambda body: None, key=keys.header())

        assert [consuming.deliver(message(body=body), "x") for body in (b"10", b"99")] == [ACK, ACK]


@pytest.mark.parametrize("payload", [keys.body, "body", 7])
def test_a_payload_that_is_no_function_is_refused(payload: Any) -> None:
    with pytest.raises(UsageError, match="payload="), Guard("memory:") as guard:
        Consuming(guard, "charge", lambda body: None, key=keys.header(), payload=payload)


def test_a_store_that_is_down_means_later_and_nothing_runs() -> None:
    class Down(ProxyStore):
        def claim(self, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable("not now")

    with Guard(Down()) as guard:
        consuming = Consuming(guard, "charge", lambda _: pytest.fail("it ran"), key=keys.header())
        verdict = consuming.deliver(message(), "body")

    assert isinstance(verdict, Later)
    assert verdict[:2] == (SOON, "StoreUnavailable: not now")


@pytest.mark.parametrize("done", [True, False])
def test_a_lost_claim_is_looked_up_once_and_only_what_is_done_is_acknowledged(done: bool) -> None:
    class Lost(ProxyStore):
        def finish(self, claim: Any, ending: Any) -> bool:
            if done:
                super().finish(claim, ending)
            return False

    with Guard(Lost()) as guard:
        verdict = Consuming(guard, "charge", lambda _: None, key=keys.header()).deliver(message(), "body")

    assert isinstance(verdict, Ack if done else Later)


def test_the_same_key_with_another_operation_is_another_consumer() -> None:
    ran: list[str] = []
    with Guard("memory:") as guard:
        for operation in ("mail", "invoice"):
            Consuming(guard, operation, ran.append, key=keys.header()).deliver(message(), operation)

    assert ran == ["mail", "invoice"]


def test_key_reused_and_best_effort() -> None:
    assert isinstance(of_error(KeyReused.about(ADDRESS)), Never)
    with Guard("memory:", policy=Policy(after_crash="skip")) as guard:
        consuming = Consuming(guard, "notify", _times_out, key=keys.header())
        verdicts = [consuming.deliver(message(), "body") for _ in range(2)]

    assert isinstance(verdicts[0], HandlerRaised)
    assert verdicts[1] == ACK


def _times_out(_body: str) -> None:
    raise TimeoutError


def test_sync_for_async_is_refused_at_once() -> None:
    async def handler(body: str) -> None: ...

    def plain(body: str) -> None: ...

    with Guard("memory:") as guard, pytest.raises(UsageError, match="its work would be lost"):
        Consuming(guard, "charge", handler, key=keys.header())
    with pytest.raises(UsageError, match="its work would be lost"):
        AsyncConsuming(AsyncGuard("memory:"), "charge", plain, key=keys.header())
    with pytest.raises(UsageError, match="takes Guard"):
        Consuming(AsyncGuard("memory:"), "charge", plain, key=keys.header())  # type: ignore[arg-type]


def test_a_handler_with_tx_commits_with_its_record(tmp_path: Any) -> None:
    import sqlite3

    path = tmp_path / "wallet.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE effects (body TEXT)")

    def credit(body: str, *, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO effects VALUES (?)", (body,))
        if body == "fail":
            raise ValueError(body)

    with Guard(f"sqlite:///{path}") as guard:
        consuming = Consuming(guard, "credit", credit, key=keys.header())
        verdicts = [consuming.deliver(message(), "ok") for _ in range(2)]
        failed = consuming.deliver(message(headers={"idempotency-key": "other"}), "fail")

    assert verdicts == [ACK, ACK]
    assert isinstance(failed, HandlerRaised)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT body FROM effects").fetchall() == [("ok",)]
