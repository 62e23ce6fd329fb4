"""The protocol in which work is written once, and its two drivers: what they perform, and what an interrupt leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onefold._concurrency.generators import Flow, run, run_async


class Sender:
    """Answers each message with itself in capitals, or raises what it is."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> Any:
        self.heard.append(message)
        if isinstance(message, BaseException):
            raise message
        return message.upper()

    def send_all(self, messages: list[Any]) -> list[Any]:
        return [self.send(message) for message in messages]


class AsyncSender:
    """The async counterpart."""

    def __init__(self, sync: Sender) -> None:
        self.sync = sync

    async def send(self, message: Any) -> Any:
        await asyncio.sleep(0)
        return self.sync.send(message)

    async def send_all(self, messages: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return self.sync.send_all(messages)


def blocking(flow: Flow[Any], sender: Sender) -> Any:
    return run(flow, sender)


def on_loop(flow: Flow[Any], sender: Sender) -> Any:
    return asyncio.run(run_async(flow, AsyncSender(sender)))


Drive = Callable[[Flow[Any], Sender], Any]
both = pytest.mark.parametrize("drive", [blocking, on_loop])


def test_the_end_of_an_iteration_in_a_request_surfaces_unchanged() -> None:
    def request() -> Any:
        raise StopIteration("its own")

    def flow() -> Flow[Any]:
        yield request

    with pytest.raises(StopIteration, match="its own"):
        run(flow())


@both
def test_a_message_gets_its_reply_and_a_list_gets_a_list(drive: Drive) -> None:
    def flow() -> Flow[Any]:
        one = yield "a"
        several = yield ["b", "c"]
        return [one, *several]

    assert drive(flow(), Sender()) == ["A", "B", "C"]


def test_a_call_needs_no_sender() -> None:
    async def answer() -> str:
        return "answer"

    def flow(call: Any) -> Flow[Any]:
        return (yield call)

    assert run(flow(lambda: "answer")) == "answer"
    assert asyncio.run(run_async(flow(answer))) == "answer"


@both
def test_an_error_may_be_an_answer(drive: Drive) -> None:
    def flow() -> Flow[Any]:
        try:
            yield ValueError("no")
        except ValueError as error:
            return (yield str(error))

    assert drive(flow(), Sender()) == "NO"


@both
def test_an_error_that_is_no_answer_goes_on(drive: Drive) -> None:
    def flow() -> Flow[Any]:
        yield ValueError("no")

    with pytest.raises(ValueError, match="no"):
        drive(flow(), Sender())


class Interrupt(BaseException):
    """As KeyboardInterrupt is, which would end the event loop, too."""


@both
def test_nothing_is_sent_after_an_interrupt(drive: Drive) -> None:
    sender, interrupt, closed = Sender(), Interrupt(), []

    def flow() -> Flow[Any]:
        try:
            yield interrupt
        except GeneratorExit:
            closed.append(True)
            raise
        except BaseException:
            yield "after"

    with pytest.raises(Interrupt):
        drive(flow(), sender)

    assert (sender.heard, closed) == ([interrupt], [True])


def test_nothing_is_sent_after_a_cancellation() -> None:
    heard: list[str] = []

    async def forever() -> None:
        heard.append("first")
        await asyncio.Event().wait()

    def flow() -> Flow[None]:
        yield forever
        heard.append("second")

    async def cancelled() -> None:
        task = asyncio.create_task(run_async(flow()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancelled())

    assert heard == ["first"]
