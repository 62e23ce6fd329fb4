"""Who may have a deliberate second run: the message that a person has let run in the store, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onefold import AsyncGuard, Guard, MissingKey, Record, RecordColumn, StoreUnavailable, UsageError, load
from onefold.queues._kafka.messages import Unreadable
from onefold.queues._shared.bypasses import BYPASS_HEADER, OPERATION, apart, apart_async, permission
from onefold.queues._shared.consumer import AsyncConsuming, Consuming
from onefold.queues._shared.verdict import ACK, Later, Never, Verdict
from onefold.queues.keys import Message, field, header
from onefold.redrive.letters import Letter, NotSent
from onefold.redrive.permissions import Permissions, in_its_store
from onefold.stores.base import Address, Query
from onefold.stores.memory import MemoryStore
from tests.queues.kafka_tools import AsyncWorker, Worker
from tests.wallet import add, balance, create

TICKET = "0" * 32


class Shop:
    """A consumer, sync or async, and how often its handler ran."""

    def __init__(
        self, url: str, *, is_async: bool, scope: str | None = None, with_tx: bool = False, **more: Any
    ) -> None:
        self.runs = 0
        self._is_async = is_async
        guard: Any = (AsyncGuard if is_async else Guard)(url, scope=scope)
        handlers: dict[tuple[bool, bool], Callable[..., Any]] = {
            (False, False): self._handle,
            (True, False): self._handle_async,
            (False, True): self._with_tx,
            (True, True): self._with_tx_async,
        }
        options: dict[str, Any] = {"key": header(), **more}
        consuming: Any = AsyncConsuming if is_async else Consuming
        self.guard = guard
        self._consuming = consuming(guard, "charge", handlers[is_async, with_tx], **options)

    def deliver(self, *messages: Message) -> list[Verdict]:
        """Deliver them, and close the guard."""

        async def all_of_them() -> list[Verdict]:
            async with self.guard:
                return [await self._consuming.deliver(message, message) for message in messages]

        if self._is_async:
            return asyncio.run(all_of_them())
        with self.guard:
            return [self._consuming.deliver(message, message) for message in messages]

    def _handle(self, _message: Any) -> None:
        self.runs += 1

    async def _handle_async(self, _message: Any) -> None:
        self.runs += 1

    def _with_tx(self, _message: Any, *, tx: Any) -> None:
        self.runs += 1
        add(tx, 10)

    async def _with_tx_async(self, _message: Any, *, tx: Any) -> None:
        self.runs += 1
        add(tx, 10)


def message(key: str = "pay-1", **headers: Any) -> Message:
    return Message(b"{}", {"idempotency-key": key, **{name.replace("_", "-"): one for name, one in headers.items()}})


def letter(key: str = "pay-1", scope: str = "") -> Letter:
    headers = {"x-onefold-digest": Address(scope, "charge", key).digest}
    return Letter("1", b"{}", headers, "charges", 0.0)


def allowed(url: str, *, key: str = "pay-1", scope: str = "", reason: str = "INC-7") -> dict[str, str]:
    with Guard(url) as guard:
        return Permissions(guard.store, "maria", reason).allow(letter(key, scope))


def record_of(url: str, scope: str | None = None) -> Record:
    with Guard(url) as guard:
        found = guard.read("charge", "pay-1", scope=scope)
    assert found is not None
    return found


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{create(tmp_path / 'shop.db')}"


@pytest.mark.parametrize("scope", [None, "acme"])
def test_what_a_person_has_allowed_runs_once_more_however_often_it_comes(
    url: str, scope: str | None, *, is_async: bool
) -> None:
    ticket = allowed(url, scope=scope or "")[BYPASS_HEADER]
    asking = message(x_onefold_bypass=ticket)
    # Kafka and Redis have bytes.
    in_bytes = message(x_onefold_bypass=ticket.encode())
    shop = Shop(url, is_async=is_async, scope=scope)

    assert shop.deliver(message(), asking, in_bytes, asking, message()) == [ACK] * 5

    assert shop.runs == 2
    assert record_of(url, scope).bypasses == 1


@pytest.mark.more
@pytest.mark.parametrize("name", ["postgres", "mysql", "redis", "dynamodb"])
def test_a_permission_is_found_in_every_store(name: str, request: pytest.FixtureRequest, *, is_async: bool) -> None:
    url = request.getfixturevalue(f"{name}_url")
    with Guard(url) as guard:
        guard.check()
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    shop = Shop(url, is_async=is_async)

    assert shop.deliver(message(), asking, asking) == [ACK] * 3

    assert shop.runs == 2
    assert record_of(url).bypasses == 1


def test_a_guard_from_a_file_honours_a_permission(url: str, tmp_path: Path) -> None:
    file = tmp_path / "onefold.yaml"
    guards = "guards:\n  payments:\n    store: main\n    operations: [charge]\n    keep: 7d\n"
    file.write_text(f"stores:\n  main:\n    url: {url}\n{guards}")
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    runs: list[Any] = []
    with load(file)["payments"] as guard:
        consuming = Consuming(guard, "charge", runs.append, key=header())

        verdicts = [consuming.deliver(one, one) for one in (message(), asking, asking)]

    assert verdicts == [ACK] * 3
    assert len(runs) == 2


def test_in_a_transaction_it_runs_once_more_and_commits_with_its_record(
    url: str, tmp_path: Path, *, is_async: bool
) -> None:
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    shop = Shop(url, is_async=is_async, with_tx=True)

    assert shop.deliver(message(), asking, asking, message()) == [ACK] * 4

    assert balance(tmp_path / "shop.db") == 20
    (said,) = record_of(url).history
    assert said.startswith("bypassed as redrive by maria at 20")
    assert said.endswith("Z: INC-7")


def test_a_message_that_has_not_run_yet_runs_once_with_its_bypass(url: str, *, is_async: bool) -> None:
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    shop = Shop(url, is_async=is_async)

    assert shop.deliver(asking, asking) == [ACK, ACK]

    assert shop.runs == 1


@pytest.mark.parametrize("forged", [TICKET, "INC-7", "", b"\xff", "x" * 10_000, 7, None])
def test_an_invented_header_is_not_obeyed_and_the_log_says_so(
    url: str, forged: Any, caplog: pytest.LogCaptureFixture, *, is_async: bool
) -> None:
    allowed(url)
    shop = Shop(url, is_async=is_async)

    assert shop.deliver(message(), message(x_onefold_bypass=forged)) == [ACK, ACK]

    assert shop.runs == 1
    digest = Address("", "charge", "pay-1").digest
    assert f"charge [key {digest}]: it asks for a bypass that nobody has allowed in this store" in caplog.text
    assert "pay-1" not in caplog.text


def test_a_header_that_was_copied_to_another_message_is_not_obeyed(url: str, *, is_async: bool) -> None:
    ticket = allowed(url)[BYPASS_HEADER]
    shop = Shop(url, is_async=is_async)

    shop.deliver(message("pay-2"), message("pay-2", x_onefold_bypass=ticket))

    assert shop.runs == 1


def test_a_store_that_does_not_tell_makes_the_message_wait() -> None:
    class Down(MemoryStore):
        def read(self, address: Address) -> Record | None:
            raise StoreUnavailable("the store is down")

    runs: list[Any] = []
    with Guard(Down()) as guard:
        consuming = Consuming(guard, "charge", runs.append, key=header())

        verdict = consuming.deliver(message(x_onefold_bypass=TICKET), None)

    assert isinstance(verdict, Later)
    assert runs == []


def test_a_row_as_the_record_cannot_run_again_and_its_dead_letter_says_why(url: str) -> None:
    def handle(_message: Any, *, tx: Any) -> None:
        tx.execute("INSERT INTO payments (idempotency_key, amount) VALUES ('pay-1', 10)")

    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    with Guard(url) as guard:
        column = RecordColumn("payments", "idempotency_key")
        consuming = Consuming(guard, "charge", handle, key=header(), record=column)
        first, again = consuming.deliver(message(), None), consuming.deliver(asking, None)

    assert first == ACK
    assert isinstance(again, Never)
    assert "cannot run it again" in again.reason


def test_headers_that_cannot_be_read_ask_for_nothing(url: str) -> None:
    runs: list[Any] = []
    with Guard(url) as guard:
        consuming = Consuming(guard, "charge", runs.append, key=field("id"))

        assert consuming.deliver(Message(b'{"id": "pay-1"}', Unreadable()), None) == ACK

    assert len(runs) == 1


def test_a_permission_is_one_record_that_says_who_when_and_why(url: str) -> None:
    first, second, other = allowed(url), allowed(url), allowed(url, reason="INC-8")

    assert first == second != other
    with Guard(url) as guard:
        found = [guard.store.read(permission(letter().digest, ticket[BYPASS_HEADER])) for ticket in (first, other)]
    assert [record.remark.rpartition(": ")[2] for record in found if record is not None] == ["INC-7", "INC-8"]


@pytest.mark.parametrize(
    ("by", "reason", "option"),
    [("", "x", "--by"), ("maria\n", "x", "--by"), ("m" * 41, "x", "--by"), ("maria", "x" * 111, "--reason")],
)
def test_who_and_why_have_to_fit_into_the_history(by: str, reason: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} takes 1 to"):
        Permissions(MemoryStore(), by, reason)

    Permissions(MemoryStore(), "m" * 40, "r" * 110).allow(letter())


def test_the_longest_who_and_why_are_the_name_of_a_bypass(url: str) -> None:
    with Guard(url) as guard:
        headers = Permissions(guard.store, "m" * 40, "r" * 110).allow(letter())
    shop = Shop(url, is_async=False)

    shop.deliver(message(), message(x_onefold_bypass=headers[BYPASS_HEADER]))

    assert shop.runs == 2


@pytest.mark.parametrize("with_tx", [False, True])
def test_a_permission_is_used_up_even_if_the_history_has_forgotten_its_name(
    url: str, *, is_async: bool, with_tx: bool
) -> None:
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    shop = Shop(url, is_async=is_async, with_tx=with_tx)
    assert shop.deliver(message(), asking) == [ACK, ACK]
    with Guard(url) as guard:
        found = guard.store.read(Address("", "charge", "pay-1"))
        assert found is not None
        guard.store.claim(msgspec.structs.replace(found, remark="").as_entry(b"t" * 16), replacing=found)

    again = Shop(url, is_async=is_async, with_tx=with_tx)
    assert again.deliver(asking, asking) == [ACK, ACK]

    assert (shop.runs, again.runs) == (2, 0)


def test_a_permission_that_is_used_up_runs_nothing_when_its_record_is_gone(url: str, *, is_async: bool) -> None:
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    Shop(url, is_async=is_async).deliver(message(), asking)
    with Guard(url) as guard:
        assert guard.forget("charge", "pay-1")
    # Whoever repeats the redrive does not make it a new one.
    allowed(url)

    shop = Shop(url, is_async=is_async)
    refused, plain = shop.deliver(asking, message())

    assert isinstance(refused, Never)
    assert "its bypass has run before, and its record is gone" in refused.reason
    assert (plain, shop.runs) == (ACK, 1)


def test_another_payload_under_a_permission_that_is_used_up_is_refused_and_not_absorbed(url: str) -> None:
    ticket = allowed(url)[BYPASS_HEADER]
    shop = Shop(url, is_async=False, payload=lambda found: found.body)
    asking = message(x_onefold_bypass=ticket)

    *done, other = shop.deliver(message(), asking, Message(b"other", asking.headers))

    assert done == [ACK, ACK]
    assert isinstance(other, Never)
    assert shop.runs == 2


def test_a_bypass_that_fails_does_not_use_up_its_permission(url: str) -> None:
    asking = message(x_onefold_bypass=allowed(url)[BYPASS_HEADER])
    runs: list[Any] = []

    def handle(_message: Any) -> None:
        runs.append(None)
        if len(runs) == 2:
            raise ValueError

    with Guard(url) as guard:
        consuming = Consuming(guard, "charge", handle, key=header())
        verdicts = [consuming.deliver(one, one) for one in (message(), asking, asking, asking)]

    assert [one == ACK for one in verdicts] == [True, False, True, True]
    assert len(runs) == 3


def test_a_bypass_that_has_run_is_done_although_its_permission_cannot_be_marked() -> None:
    class Failing(MemoryStore):
        def claim(self, entry: Any, *, replacing: Record | None = None) -> Any:
            if replacing is not None and entry.address.operation == OPERATION:
                raise StoreUnavailable("the store is down")
            return super().claim(entry, replacing=replacing)

    store, runs = Failing(), list[Any]()
    asking = message(x_onefold_bypass=Permissions(store, "maria", "INC-7").allow(letter())[BYPASS_HEADER])
    with Guard(store) as guard:
        consuming = Consuming(guard, "charge", runs.append, key=header())

        assert [consuming.deliver(one, one) for one in (message(), asking, asking)] == [ACK] * 3

    assert len(runs) == 2


def test_a_record_that_a_letter_names_is_read_at_once_and_others_are_looked_for_once() -> None:
    class Counting(MemoryStore):
        pages = 0

        def browse(self, query: Query, limit: int) -> list[Record]:
            self.pages += 1
            return super().browse(query, limit)

    store = Counting()
    with Guard(store) as guard:
        for number in range(3):
            guard.run("charge", f"pay-{number}", lambda: None, scope="acme")
        guard.run("charge", "pay-1", lambda: None)
    checked = in_its_store(lambda _letter: {}, store)
    about = {"x-onefold-operation": "charge"}

    def of(key: str, scope: str = "", **more: str) -> Letter:
        return Letter("1", b"", {**letter(key, scope).headers, **about, **more}, "charges", 0.0)

    checked(of("pay-1", **{"idempotency-key": "pay-1"}))
    assert store.pages == 0
    for number in range(3):
        checked(of(f"pay-{number}", "acme", **{"idempotency-key": f"pay-{number}"}))
    assert store.pages == 1
    with pytest.raises(NotSent, match="no record of its operation, charge, with its digest"):
        checked(of("pay-9", **{"idempotency-key": "pay-9"}))
    assert store.pages == 1


def test_a_letter_without_a_digest_gets_no_permission() -> None:
    with pytest.raises(NotSent, match="no digest"):
        Permissions(MemoryStore(), "maria", "INC-7").allow(Letter("1", b"", {}, "charges", None))


def test_in_a_batch_those_that_ask_are_delivered_one_by_one_and_each_keeps_its_verdict() -> None:
    class Delivery:
        def __init__(self, number: int, **headers: str) -> None:
            self.message = message(f"pay-{number}", **headers)
            self.number = number

    deliveries = [Delivery(0), Delivery(1, x_onefold_bypass=TICKET), Delivery(2)]

    def one(taken: Sequence[Any]) -> list[Verdict]:
        return [Never(f"one {delivery.number}") for delivery in taken]

    def many(taken: Sequence[Any]) -> list[Verdict]:
        return [Never(f"many {delivery.number}") for delivery in taken]

    async def one_async(taken: Sequence[Any]) -> list[Verdict]:
        return one(taken)

    async def many_async(taken: Sequence[Any]) -> list[Verdict]:
        return many(taken)

    expected = [Never("many 0"), Never("one 1"), Never("many 2")]
    assert apart(one, many, deliveries) == expected
    assert asyncio.run(apart_async(one_async, many_async, deliveries)) == expected
    assert apart(one, many, deliveries[1:2]) == expected[1:2]
    assert apart(one, many, deliveries[:1]) == expected[:1]


@pytest.mark.parametrize("worker", [Worker, pytest.param(AsyncWorker, marks=pytest.mark.more)])
def test_a_bypass_in_a_batch_of_kafka_runs(kafka_url: str, kafka_topic: str, url: str, worker: Any) -> None:
    runs: list[bytes] = []

    def handle(found: Any) -> None:
        value = found.value
        runs.append(value() if callable(value) else value)

    digest = Address("", "credit", "pay-1").digest
    with Guard(url) as guard:
        found = Letter("1", b"", {"x-onefold-digest": digest}, "", None)
        headers = Permissions(guard.store, "maria", "INC-7").allow(found)
    with worker(kafka_url, kafka_topic, handle, store=url, poll=10) as one:
        one.send(kafka_topic, b"1", key="pay-1", partition_by=b"a")
        one.until(lambda: runs == [b"1"])
        for _ in range(2):
            one.send(kafka_topic, b"again", key="pay-1", partition_by=b"a", headers=headers)
        one.send(kafka_topic, b"2", key="pay-2", partition_by=b"a")
        one.until(lambda: b"2" in runs)

    assert sorted(runs) == [b"1", b"2", b"again"]


def test_a_header_of_a_message_without_a_key_is_not_looked_at(url: str) -> None:
    shop = Shop(url, is_async=False)

    (verdict,) = shop.deliver(Message(b"{}", {BYPASS_HEADER: TICKET}))

    assert isinstance(verdict, Never)


def test_reading_a_key_that_is_missing_is_still_reported() -> None:
    with pytest.raises(MissingKey):
        BYPASS_HEADER in Unreadable()  # noqa: B015 - it raises
