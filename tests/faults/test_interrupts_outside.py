"""An `Exception` of a signal's handler in claim mode: in an operation of the store, while a result is encoded.

Celery's soft time limit is one. It is raised to the caller, the connection on which it came is not used again, and
nothing stays claimed that did not run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import count
from typing import Any

import pydantic
import pytest

from onefold import Guard, Policy, current
from onefold.codecs import MsgspecCodec
from onefold.stores.mysql.dialect import MYSQL
from onefold.stores.sql.dialect import Reply, SqlRequest
from tests.faults.test_interrupts_joined import Face, SoftTimeLimitExceeded
from tests.faults.test_interrupts_unread import FACES, Struck, address
from tests.support import Handler

__all__ = ["address"]

HOLD = Policy(after_crash="hold")

EVERYDAY = ["pymysql", "sqlalchemy, pymysql", "django, pymysql"]
# SQLAlchemy leaves a connection of psycopg to the garbage collector if it is interrupted as its pool takes it back.
OTHERS = sorted(set(FACES) - {*EVERYDAY, "sqlalchemy, psycopg"})


@pytest.mark.filterwarnings("ignore:.*BasePipeline._exit_gen:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("face", [*EVERYDAY, *(pytest.param(name, marks=pytest.mark.more) for name in OTHERS)])
@pytest.mark.parametrize("result", [None, "credited"])
def test_whichever_answer_is_not_read_a_claim_is_given_back_or_ended(
    face: str, result: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Callable[[str], AbstractContextManager[Face]] = FACES[face][1]
    with opened(address) as working:
        guard = working.guard
        guard.run("credit", "first", Handler(result), policy=HOLD)
        struck = Struck(monkeypatch)
        for at in count(1):
            handler = Handler(result)
            struck.set(at)
            with suppress(SoftTimeLimitExceeded):
                guard.run("credit", f"m{at}", handler, policy=HOLD)
                # SQLAlchemy's pool swallows what comes as it takes a connection back, and closes that.
                assert not struck.is_over or face.startswith(("session", "sqlalchemy")), "it was swallowed"
            if not struck.is_over:
                assert at > 2
                break
            struck.set(0)
            again = [guard.run("credit", f"m{at}", handler, policy=HOLD) for _ in range(3)]

            assert handler.starts == 1, at
            assert [(one.value, one.recorded) for one in again] == [(result, True)] * 3, at
            assert [one.replayed for one in again[1:]] == [True, True], at


@pytest.mark.parametrize("operation", ["claim", "finish"])
@pytest.mark.parametrize("fixture", ["sqlite_url", "redis_url", "dynamodb_url"])
def test_an_operation_of_a_store_whose_answer_was_not_heard_is_asked_again(
    fixture: str, operation: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, interrupts = Handler("receipt"), [SoftTimeLimitExceeded("now")]
    with Guard(request.getfixturevalue(fixture)) as guard:
        asked = getattr(guard.store, operation)

        def interrupted(*values: Any, **options: Any) -> Any:
            answer = asked(*values, **options)
            if interrupts:
                raise interrupts.pop()
            return answer

        monkeypatch.setattr(guard.store, operation, interrupted)
        with pytest.raises(SoftTimeLimitExceeded):
            guard.run("pay", "p1", handler, policy=HOLD)
        outcome = guard.run("pay", "p1", handler, policy=HOLD)

    assert (handler.starts, outcome.value, outcome.replayed) == (1, "receipt", operation == "finish")


@pytest.fixture
def sqlite_url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


class Slow(MsgspecCodec):
    """The limit is reached as it encodes its first value."""

    def __init__(self, interrupt: BaseException) -> None:
        self._interrupts = [interrupt]

    def encode(self, value: Any, returns: Any) -> bytes:
        if self._interrupts:
            raise self._interrupts.pop()
        return super().encode(value, returns)


@pytest.mark.parametrize("kind", [SoftTimeLimitExceeded, TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["run", "seen"])
def test_an_interrupt_while_a_result_is_encoded_goes_on_and_the_result_is_kept(
    mode: str, kind: type[BaseException]
) -> None:
    guard, handler = Guard("memory:", codec=Slow(kind("now"))), Handler("receipt")
    policy = Policy() if mode == "run" else Policy(mode="seen")

    with pytest.raises(kind):
        guard.run("pay", "p1", handler, policy=policy)
    again = guard.run("pay", "p1", handler, policy=policy)

    assert (handler.starts, again.value, again.replayed) == (1, "receipt", True)


def test_inside_a_transaction_it_rolls_back(tmp_path: Any) -> None:
    guard = Guard(f"sqlite:///{tmp_path / 'shop.db'}", codec=Slow(SoftTimeLimitExceeded()))
    ran = []

    @guard.transactional("pay", key="payment")
    def pay(payment: str, *, tx: Any) -> str:
        del tx
        ran.append(payment)
        return "receipt"

    with guard:
        with pytest.raises(SoftTimeLimitExceeded):
            pay("p1")  # type: ignore[call-arg]
        assert [pay("p1") for _ in range(2)] == ["receipt"] * 2  # type: ignore[call-arg]
        assert ran == ["p1"] * 2


class Receipt(pydantic.BaseModel):
    """Its own code runs when it is encoded, and when it is read back."""

    number: int

    @pydantic.field_serializer("number")
    def _written(self, number: int) -> int:
        if _interrupts.get("written"):
            raise _interrupts.pop("written")
        return number

    @pydantic.field_validator("number")
    @classmethod
    def _read(cls, number: int) -> int:
        if _interrupts.get("read"):
            raise _interrupts.pop("read")
        return number


_interrupts: dict[str, Exception] = {}


@pytest.mark.parametrize("where", ["written", "read"])
def test_an_interrupt_in_the_code_of_a_value_is_not_taken_for_an_error_of_the_codec(where: str) -> None:
    guard, value = Guard("memory:"), Receipt(number=1)
    _interrupts[where] = SoftTimeLimitExceeded("now")

    # Pydantic wraps what it is told while it writes.
    with pytest.raises(Exception, match="now"):
        guard.run("pay", "p1", Handler(value), returns=Receipt)

    assert guard.run("pay", "p1", Handler(), returns=Receipt).value == value


def test_a_talk_about_a_longer_wait_can_be_closed_at_any_time() -> None:
    flow = MYSQL.waiting(SqlRequest("UPDATE", {}), 1)
    next(flow)
    assert flow.send(Reply(0)).statement == "UPDATE"  # type: ignore[union-attr]

    flow.close()


def test_a_longer_wait_is_put_back_after_an_answer_and_after_an_error() -> None:
    for failure in (None, LookupError()):
        flow = MYSQL.waiting(SqlRequest("UPDATE", {}), 1)
        next(flow)
        flow.send(Reply(0))
        last = flow.send(Reply(1)) if failure is None else flow.throw(failure)
        assert last.statement.endswith("= DEFAULT")  # type: ignore[union-attr]
        with pytest.raises(StopIteration if failure is None else LookupError):
            flow.send(Reply(0))


def test_a_step_whose_value_is_encoded_meanwhile_is_not_done_again() -> None:
    guard, reserve = Guard("memory:", codec=Slow(SoftTimeLimitExceeded())), Handler("room 1")

    def book() -> str:
        return str(current().step("reserve", reserve))

    with pytest.raises(SoftTimeLimitExceeded):
        guard.run("book", "b1", book)

    assert guard.run("book", "b1", book).value == "room 1"
    assert reserve.starts == 1
