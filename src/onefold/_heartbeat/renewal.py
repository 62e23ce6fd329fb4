"""One renewal of some claims, sync or async, and the meaning of its answers.

The renewal of one claim never depends on another's: claims that can fail separately (in a store that renews one by one,
on one of several servers) are sent separately, each answer counts as soon as it arrives, and an error concerns its own
claims only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from onefold._heartbeat import clock
from onefold._heartbeat.beats import Beat, patience
from onefold._heartbeat.late import too_late
from onefold._heartbeat.logs import told_failed
from onefold._model import Claim
from onefold.events import Teller
from onefold.stores.base import Batching, PartlyRenewed

if TYPE_CHECKING:
    import asyncio

# The beats that were not renewed, and why.
Outcome = tuple[list[Beat], Exception | None]


def renew(store: Any, beats: list[Beat], tell: Teller) -> None:
    """Renew these claims, blocking; an error concerns them alone."""
    sent, claims = clock.monotonic(), claims_of(beats)
    try:
        answers = store.extend_all(claims) if isinstance(store, Batching) else [store.extend(claims[0])]
        hear(beats, answers, sent)
    except Exception as error:  # noqa: BLE001 - the next beat retries, and `lost` is determined by the clock
        tell_failures(tell, [(unanswered(beats, error, sent), error)])
    finally:
        for beat in beats:
            beat.under_way = False


async def renew_async(store: Any, beats: list[Beat], *, batching: bool, room: asyncio.Semaphore | None = None) -> None:
    """Renew these claims asynchronously, waiting for their turn first if `room` limits concurrency."""
    async with room or nullcontext():
        sent, claims = clock.monotonic(), claims_of(beats)
        try:
            answers = await store.extend_all(claims) if batching else [await store.extend(claims[0])]
        except PartlyRenewed as error:
            unanswered(beats, error, sent)
            raise
        hear(beats, answers, sent)


async def outcome_of(asked: Awaitable[None], beats: list[Beat]) -> Outcome:
    from asyncio import wait_for

    try:
        await wait_for(asked, patience(beats))
    except PartlyRenewed as error:
        return unanswered(beats, error, None), error
    except Exception as error:  # noqa: BLE001 - the next beat retries, and `lost` is determined by the clock
        return beats, error
    finally:
        for beat in beats:
            beat.under_way = False
    return [], None


def claims_of(beats: Sequence[Beat]) -> list[Claim]:
    return [beat.claim for beat in beats]


def grouped(beats: Sequence[Beat], groups: Sequence[Sequence[int]]) -> list[list[Beat]]:
    return [[beats[index] for index in group] for group in groups]


def hear(beats: Sequence[Beat], answers: Sequence[bool | None], sent: float) -> None:
    """Apply the store's answers to the beats that were sent at this time; None is no answer."""
    for beat, ours in zip(beats, answers, strict=True):
        if ours:
            beat.sent = sent
        elif ours is not None:
            beat.refuse()


def unanswered(beats: list[Beat], error: Exception, sent: float | None) -> list[Beat]:
    """Return the beats that this error leaves unanswered; apply the known answers of the others, if `sent` is given."""
    if not isinstance(error, PartlyRenewed):
        return beats
    if sent is not None:
        hear(beats, error.answers, sent)
    return [beat for beat, answer in zip(beats, error.answers, strict=True) if answer is None]


def tell_failures(tell: Teller, outcomes: Sequence[Outcome]) -> None:
    """Report failed renewals, grouped by cause, as each claim may have been sent separately."""
    causes: dict[str, tuple[list[Beat], Exception]] = {}
    for beats, error in outcomes:
        if error is not None:
            causes.setdefault(f"{type(error).__name__}: {error}", ([], error))[0].extend(beats)
    for beats, error in causes.values():
        if isinstance(error, TimeoutError):
            too_late(tell, beats)
        elif isinstance(error, PartlyRenewed):
            too_late(tell, beats, str(error))
        else:
            told_failed(tell, beats, error)
