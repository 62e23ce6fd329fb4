"""Words for the tests of those who wait for another delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onefold._concurrency.waiters import ROOMS
from onefold._delivery import claim as claim_flow
from onefold._delivery.steps import Waiting
from onefold._model import Record
from onefold.keys import address
from tests.support import PATIENCE

CHARGE = address("charge", "pay_1")

# Nobody gives up before the test does: a last look would hide that it was not woken.
LONG = 10 * PATIENCE

# As rarely as never, within a test.
NEVER = 1000.0


@pytest.fixture
def without_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks before it is woken, or has to give up."""

    def step(found: Record, waited: float, wait: float, lease: float) -> Waiting:
        return Waiting(NEVER, found, NEVER, wait - waited)

    monkeypatch.setattr(claim_flow, "waiting_for", step)


def waiting(address: Any = CHARGE) -> int:
    return sum(len(room.members) for room in ROOMS.get(address, ()))


async def until(holds: Callable[[], bool]) -> None:
    """Let the other tasks and threads go on until it holds."""
    while not holds():  # noqa: ASYNC110 - others bring it about, and do not know of it
        await asyncio.sleep(0)
