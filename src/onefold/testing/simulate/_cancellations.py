"""The world of transactions in which deliveries are tasks, and are cancelled at every point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import replace

from onefold._delivery.steps import Beginning, Committing, RollingBack, StoreStep
from onefold.testing.simulate._statements import Violation
from onefold.testing.simulate._tasks import Cancelled, TaskNode, can_be_cancelled
from onefold.testing.simulate._transactions import Client, Database, Transaction, Transactions, orphaned
from onefold.testing.simulate._worker import End, Moment
from onefold.testing.simulate._world import Action

# In how many turns of the event loop a task is cancelled; 0 means in each until it has ended.
TURNS: Final = {"once": 1, "twice": 2, "at every turn": 0}

# The fate of a statement whose sender was cancelled: not sent, executed, or cancelled by the server together with its
# transaction.
FATES: Final = ("not sent", "executed", "rolled back")


class Cancellations(Transactions):
    """The additional events of that world."""

    node_type = TaskNode

    def _faults(self, world: Database, who: int, moment: Moment) -> tuple[str, ...]:
        fates: tuple[str, ...] = (
            FATES if isinstance(moment, StoreStep) and not isinstance(moment, (Committing, RollingBack)) else FATES[:1]
        )
        if isinstance(moment, StoreStep) and self._is_blocked(world, who):
            # It waits for another transaction.
            fates = (FATES[0], FATES[2])
        cancelled = [f"is cancelled {how}, {fate}" for how in TURNS for fate in fates]
        return (*super()._faults(world, who, moment), *(cancelled if can_be_cancelled(moment) else ()))

    def actions(self, world: Database) -> Iterator[Action]:
        for who, client in enumerate(world.clients):
            if isinstance(client.at, End) and client.at.kind == "a hang":
                raise Violation(8, f"{self.plans[who].name} waits for ever after a cancellation")
        return super().actions(world)

    def _ask(self, world: Database, who: int, client: Client, step: StoreStep, way: str) -> Database:
        if not way.startswith("is cancelled"):
            if client.open is None and not isinstance(step, (Beginning, RollingBack)):
                raise Violation(7, "a statement was sent outside of a transaction, where it is committed by itself")
            return super()._ask(world, who, client, step, way)
        how, _, fate = way.removeprefix("is cancelled ").partition(", ")
        reply: Any = None
        if isinstance(step, Committing):
            world, reply = self._committed(world, client, "goes on")
            client = replace(client, open=None)
        elif isinstance(step, RollingBack) or fate == "rolled back":
            client = replace(client, open=None)
        elif fate == "executed":
            client = self._executed(world, client, step)
        return self._after(world, who, client, Cancelled(TURNS[how], reply))

    def _executed(self, world: Database, client: Client, step: StoreStep) -> Client:
        if isinstance(step, Beginning):
            return replace(client, open=Transaction())
        return self._perform(world, client, step)[0]

    def _decided(self, world: Database, who: int, client: Client, moment: Moment, way: str) -> Database:
        if not way.startswith("is cancelled"):
            return super()._decided(world, who, client, moment, way)
        how = way.removeprefix("is cancelled ").partition(", ")[0]
        return self._after(world, who, client, Cancelled(TURNS[how]))

    def _after(self, world: Database, who: int, client: Client, reply: Any) -> Database:
        before = client.node
        assert isinstance(before, TaskNode)
        after = before.after(reply)
        assert isinstance(after, TaskNode)
        if after.closed > before.closed and client.open is not None:
            # The server itself notices that the connection is gone.
            world, client = orphaned(world, client.open), replace(client, open=None)
        return super()._after(world, who, client, reply)
