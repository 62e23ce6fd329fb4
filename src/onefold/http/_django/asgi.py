"""Let a request with a key finish on Django's ASGI when its client disconnects, and during the grace of a shutdown.

Django cancels a request whose client has disconnected. A server that shuts down cancels Django, which abandons the
request, and then waits for its thread without telling it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import SyncToAsync, iscoroutinefunction, sync_to_async

from onefold.http._asgi import background_requests
from onefold.http._exchange.rules import LOG

# How often a request checks whether its server has abandoned it.
LOOKS_SECONDS: Final = 1.0


async def to_its_end(respond: Callable[[Callable[[], bool]], Any], request: Any) -> Any:
    """Respond in the thread of this request, and ignore cancellations, except that of a server whose grace is over.

    Django waits for us: the thread of the request, and its connections, are needed until then. `respond` gets to know
    whether it was cancelled: by us when the grace is over, or by the end of the loop.
    """
    work: asyncio.Task[Any] = asyncio.ensure_future(sync_to_async(respond)(lambda: work.cancelling() > 0))
    cancelled = await _ended(work, request)
    if not cancelled:
        return work.result()
    try:
        response = work.result()
    except Exception:  # noqa: BLE001 - nobody is left to tell
        LOG.exception("a request whose client had gone ended in an error")
    else:
        await sync_to_async(response.close)()
    await sync_to_async(request.close)()
    raise asyncio.CancelledError


async def _ended(work: asyncio.Task[Any], request: Any) -> bool:
    """Wait for its end, or end it after the grace. Return whether we were cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    context = SyncToAsync.thread_sensitive_context.get(None)
    cancellations = 0
    grace_ends: float | None = None
    while not work.done():
        try:
            await asyncio.wait({work}, timeout=LOOKS_SECONDS)
        except asyncio.CancelledError:
            cancellations += 1
        # The first cancellation is Django's, for a disconnected client: that has no bound. The server's comes through
        # Django after it.
        if grace_ends is None and (cancellations > 1 or _has_left(context)):
            grace_ends = loop.time() + background_requests.GRACE
        if grace_ends is not None and loop.time() >= grace_ends and not work.cancelling() and not _is_blocking(request):
            LOG.warning(
                "a view was cancelled: its server is shutting down, and its grace of %g s is over",
                background_requests.GRACE,
            )
            work.cancel()
    return cancellations > 0


def _has_left(context: Any) -> bool:
    """Return whether Django has left the block of this request, and waits for its thread: it was cancelled itself."""
    return context is not None and context.token is None


def _is_blocking(request: Any) -> bool:
    """Return whether its view is sync: it cannot be cancelled, and its thread ends only with its response."""
    match = request.resolver_match
    return match is not None and not iscoroutinefunction(match.func)
