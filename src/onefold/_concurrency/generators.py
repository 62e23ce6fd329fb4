"""One protocol for everything that waits for replies: flows, and a driver each for sync and async.

A flow is a generator of requests. Those of deliveries yield the steps of `_delivery.steps`, and have drivers of their
own in `_delivery.drive`, which know what an interrupt means for a claim.

A request is a call without arguments, or a message to the sender that the driver was given: one message, or a list of
several that belong together. The driver performs it and sends the reply in. An error is thrown in: it may be an answer.

An interrupt (KeyboardInterrupt, a cancelled task) is not thrown in, because nothing may be sent after it: the driver
closes the generator. So no generator yields in a `finally`; resources that have to be returned are held by a context
manager around the driver.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from onefold._concurrency.users_errors import as_raised

T = TypeVar("T")

# Yields requests, is sent their replies, and returns its result.
Flow = Generator[Any, Any, T]


def run(flow: Flow[T], sender: Any = None) -> T:
    """Perform the requests of a generator, blocking; return its result."""
    ended: StopIteration | None = None
    try:
        request = next(flow)
        while True:
            try:
                if callable(request):
                    reply = request()
                elif isinstance(request, list):
                    reply = sender.send_all(request)
                else:
                    reply = sender.send(request)
            except Exception as error:  # noqa: BLE001 - the generator raises it again, unless it is an answer
                ended = error if isinstance(error, StopIteration) else None
                request = flow.throw(error)
            else:
                request = flow.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException as raised:
        flow.close()
        # A call can end in it, such as a user's handler. In `run_async` there is no such case: a coroutine cannot.
        if ended is not None and as_raised(raised) is ended:
            raise ended from None
        raise


async def run_async(flow: Flow[T], sender: Any = None) -> T:
    """Perform the requests of a generator, awaiting each; return its result."""
    try:
        request = next(flow)
        while True:
            try:
                if callable(request):
                    reply = await request()
                elif isinstance(request, list):
                    reply = await sender.send_all(request)
                else:
                    reply = await sender.send(request)
            except Exception as error:  # noqa: BLE001 - the generator raises it again, unless it is an answer
                request = flow.throw(error)
            else:
                request = flow.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except BaseException:
        flow.close()
        raise
