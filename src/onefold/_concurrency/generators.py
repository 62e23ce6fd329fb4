"""One protocol for work that waits for somebody else: generators of requests, and a driver each for sync and async.

A request is a call without arguments, or a message to the sender that the driver was given: one message, or a list of
several that belong together. The driver performs it and sends the reply in. An error is thrown in: it may be an answer.

An interrupt (KeyboardInterrupt, a cancelled task) is not thrown in, because nothing may be sent after it: the driver
closes the generator. So no generator yields in a `finally`; what has to be given back is held by a context manager
around the driver.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

# Yields requests, gets replies, and returns what the work has come to.
Work = Generator[Any, Any, T]


def run(work: Work[T], sender: Any = None) -> T:
    """Perform the requests of a generator, blocking; return what it returns."""
    try:
        request = next(work)
        while True:
            try:
                if callable(request):
                    reply = request()
                elif isinstance(request, list):
                    reply = sender.send_all(request)
                else:
                    reply = sender.send(request)
            except Exception as error:  # noqa: BLE001 - the generator raises it again, unless it is an answer
                request = work.throw(error)
            else:
                request = work.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        work.close()
        raise


async def run_async(work: Work[T], sender: Any = None) -> T:
    """Perform the requests of a generator, awaiting each; return what it returns."""
    try:
        request = next(work)
        while True:
            try:
                if callable(request):
                    reply = await request()
                elif isinstance(request, list):
                    reply = await sender.send_all(request)
                else:
                    reply = await sender.send(request)
            except Exception as error:  # noqa: BLE001 - the generator raises it again, unless it is an answer
                request = work.throw(error)
            else:
                request = work.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        work.close()
        raise
