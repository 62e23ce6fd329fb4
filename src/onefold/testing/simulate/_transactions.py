"""The world of transactions: the record and the effect are rows of one database, and commit together.

A row that is written in an open transaction blocks every other writer until that transaction has ended. A server
ends the transaction of a lost connection when it notices, and it may still execute a COMMIT whose sender has gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from onefold import StoreUnavailable
from onefold._delivery.steps import Beginning, Claiming, Committing, RollingBack, StillOpen, StoreStep
from onefold._model import Commit
from onefold.stores.memory import MemoryStore, Row
from onefold.testing.simulate._scenario import ADDRESS, NOW, Scenario
from onefold.testing.simulate._statements import Violation
from onefold.testing.simulate._stories import told
from onefold.testing.simulate._worker import Choose, Effect, End, Fails, Moment, Node, Placed
from onefold.testing.simulate._world import NATURE, Action


class Transaction(msgspec.Struct, frozen=True):
    """The writes of an open transaction."""

    row: Row | None = None
    effects: int = 0
    # A COMMIT is in progress whose sender has gone.
    committing: bool = False

    @property
    def writes(self) -> bool:
        return self.row is not None


class Client(Placed, frozen=True):
    """One worker and its connection."""

    open: Transaction | None = None


class Database(msgspec.Struct, frozen=True):
    """The committed data, the clients, and the transactions that have lost their connection."""

    row: Row | None
    effects: int
    clients: tuple[Client, ...]
    orphans: tuple[Transaction, ...]
    faults: int


class Transactions:
    """The possible events in a world of transactions, and the world after each."""

    node_type: type[Node] = Node

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.store: MemoryStore = scenario.store(clock=lambda: NOW)
        self.plans = scenario.plans()
        self._first = tuple(self.node_type(plan) for plan in self.plans)
        self._last = self.node_type(scenario.plan("the last delivery"))

    def first(self) -> Database:
        return Database(None, 0, tuple(Client(node) for node in self._first), (), self.scenario.faults)

    def actions(self, world: Database) -> Iterator[Action]:
        for who, client in enumerate(world.clients):
            if client.ended:
                continue
            moment = client.at
            if isinstance(moment, Choose):
                yield Action(who, moment.ways[0])
                if world.faults:
                    yield Action(who, moment.ways[1], fault=True)
            elif not self._is_blocked(world, who):
                yield Action(who, "goes on")
            if world.faults:
                yield Action(who, "dies", fault=True)
                yield from (Action(who, way, fault=True) for way in self._faults(world, who, moment))
        for number, orphan in enumerate(world.orphans):
            yield Action(NATURE, f"{'commits' if orphan.committing else 'drops'} {number}")

    def _faults(self, world: Database, who: int, moment: Moment) -> tuple[str, ...]:
        if isinstance(moment, Committing):
            return ("no answer", "answer lost", "arrives late", "conflict")
        if isinstance(moment, Claiming) and not self._is_blocked(world, who):
            return ("conflict",)
        return ()

    def _is_blocked(self, world: Database, who: int) -> bool:
        """Return whether a claim waits for another open transaction that has written the row."""
        if not isinstance(world.clients[who].at, Claiming):
            return False
        others = [client.open for number, client in enumerate(world.clients) if number != who]
        return any(one is not None and one.writes for one in (*others, *world.orphans))

    def apply(self, world: Database, action: Action) -> Database:
        if action.fault:
            world = replace(world, faults=world.faults - 1)
        if action.who == NATURE:
            return self._server(world, action.way)
        client = world.clients[action.who]
        if action.way == "dies":
            return _put(orphaned(world, client.open), action.who, replace(client, dead=True, open=None))
        moment = client.at
        if isinstance(moment, StoreStep):
            return self._ask(world, action.who, client, moment, action.way)
        return self._decided(world, action.who, client, moment, action.way)

    def _decided(self, world: Database, who: int, client: Client, moment: Moment, way: str) -> Database:
        """Apply an event in the handler."""
        if isinstance(moment, Effect):
            assert client.open is not None
            client = replace(client, open=replace(client.open, effects=client.open.effects + 1))
        return self._after(world, who, client, way if isinstance(moment, Choose) else None)

    def _server(self, world: Database, way: str) -> Database:
        verb, _, number = way.partition(" ")
        orphan = world.orphans[int(number)]
        orphans = world.orphans[: int(number)] + world.orphans[int(number) + 1 :]
        world = replace(world, orphans=orphans)
        return self._commit(world, orphan) if verb == "commits" else world

    def _ask(self, world: Database, who: int, client: Client, step: StoreStep, way: str) -> Database:
        reply: Any = None
        if isinstance(step, Beginning):
            client = replace(client, open=Transaction())
        elif isinstance(step, Committing):
            world, reply = self._committed(world, client, way)
            client = replace(client, open=None)
        elif isinstance(step, StillOpen):
            pass
        elif isinstance(step, RollingBack):
            # A failed statement stands for a serialization error here: the database asks for a retry.
            client, reply = replace(client, open=None), isinstance(step.error, StoreUnavailable)
        elif way == "conflict":
            # The statement fails with a serialization error, and so does the transaction.
            reply = Fails()
        else:
            client, reply = self._perform(world, client, step)
        return self._after(world, who, client, reply)

    def _committed(self, world: Database, client: Client, way: str) -> tuple[Database, Commit]:
        assert client.open is not None
        match way:
            case "conflict":
                return world, Commit.CONFLICT
            case "no answer":
                return orphaned(world, client.open), Commit.UNKNOWN
            case "arrives late":
                return orphaned(world, replace(client.open, committing=True)), Commit.UNKNOWN
            case "answer lost":
                return self._commit(world, client.open), Commit.UNKNOWN
            case _:
                return self._commit(world, client.open), Commit.DONE

    def _commit(self, world: Database, transaction: Transaction) -> Database:
        effects = world.effects + transaction.effects
        if effects > 1:
            raise Violation(7, f"the effect was committed {effects} times")
        if transaction.effects and transaction.row is None:
            raise Violation(7, "an effect was committed without its record")
        return replace(world, effects=effects, row=transaction.row or world.row)

    def _perform(self, world: Database, client: Client, step: StoreStep) -> tuple[Client, Any]:
        """Perform one statement of the production store, on the data that this transaction sees."""
        assert client.open is not None
        seen = client.open.row or world.row
        rows = self.store._rows
        rows.clear()
        if seen is not None:
            rows[ADDRESS] = seen
        reply = step.send(self.store)
        row = rows.get(ADDRESS)
        if row == seen or row is None:
            return client, reply
        return replace(client, open=replace(client.open, row=replace(row, began=0.0))), reply

    def _after(self, world: Database, who: int, client: Client, reply: Any) -> Database:
        client = replace(client, node=client.node.after(reply))
        end = client.at
        if isinstance(end, End):
            if client.open is not None:
                raise Violation(7, "a delivery ended with its transaction open")
            if end.kind == "outcome" and (world.row is None or world.effects != 1):
                raise Violation(7, "a delivery ended well, and its effect is not committed")
            client = Client(client.node)
        return _put(world, who, client)

    def close(self, world: Database, lines: list[str]) -> None:
        """Check invariant 8: when all is over, a fresh delivery runs or replays."""
        world = replace(world, clients=(Client(self._last),), faults=0)
        while not world.clients[0].ended:
            moment = world.clients[0].at
            action = Action(0, moment.ways[0] if isinstance(moment, Choose) else "goes on")
            after = self.apply(world, action)
            lines.append(self.tell(world, action, after, name="the last delivery"))
            world = after
        if world.effects != 1 or world.clients[0].at.kind != "outcome":  # type: ignore[union-attr]
            raise Violation(8, f"in the end the effect was committed {world.effects} times")

    def tell(self, world: Database, action: Action, after: Database | None, *, name: str = "") -> str:
        if action.who == NATURE:
            commits = action.way.startswith("commits")
            return "the server executes a COMMIT whose sender has gone" if commits else "the server rolls back"
        moment = world.clients[action.who].at
        then = after.clients[action.who].at if after is not None else None
        changed = None if after is None else (world.row, after.row)
        return told(name or self.plans[action.who].name, moment, action.way, then, changed)


def orphaned(world: Database, transaction: Transaction | None) -> Database:
    return world if transaction is None else replace(world, orphans=(*world.orphans, transaction))


def _put(world: Database, who: int, client: Client) -> Database:
    return replace(world, clients=(*world.clients[:who], client, *world.clients[who + 1 :]))
