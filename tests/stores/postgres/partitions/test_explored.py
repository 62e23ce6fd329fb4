"""What happens to a record around a transaction, in many orders: it never runs a key whose record is alive elsewhere.

The transaction takes its snapshot at one moment, and claims the key at a later one. At REPEATABLE READ and above it
does not see what happened in between: seals, moves, drops, claims, ends, renewals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from onefold import Guard
from onefold._concurrency.generators import run
from tests.stores.postgres.partitions.tools import AT_ONCE, TURNING_ONLY, guard_on
from tests.stores.postgres.tools import another

LEVELS = (IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE)
LONG_AGO, JUST_NOW, LATER = -7200, -1, 3600
ALIVE = "(expires IS NULL OR expires > date_part('epoch', clock_timestamp()))"


class Story:
    """One key, what may happen to its record, and somebody who joins a transaction of their own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = ""
        self.guard, self.joining = guard_on(url), Guard(url)
        # As often as they are here.
        self.events: list[Callable[[], Any]] = [
            partial(self.delivered, "forever"),
            partial(self.delivered, "1h"),
            *[partial(self.turned, AT_ONCE)] * 2,
            *[partial(self.turned, TURNING_ONLY)] * 2,
            *(partial(self.expires, when) for when in (LONG_AGO, JUST_NOW, LATER)),
            partial(self.expires, LONG_AGO, "other"),
            lambda: self.guard.forget("charge", self.key),
        ]

    def delivered(self, keep: str) -> None:
        self.guard.run("charge", self.key, lambda: 1, keep=keep)

    def turned(self, sql: Any) -> None:
        self.guard.run("charge", "other", lambda: 1)
        with self.guard.store._pool.acquire() as connection:
            run(sql.turn("30ms", 0), connection)

    def expires(self, when: int, key: str | None = None) -> None:
        moment = f"date_part('epoch', clock_timestamp()) + {when}"
        with another(self.url) as connection:
            connection.execute(
                f"UPDATE onefold_records SET expires = {moment}, due = floor(({moment}) / 600) "
                f"WHERE key = '{key or self.key}'".encode()
            )

    def count(self, condition: str) -> int:
        with another(self.url) as connection:
            found = connection.execute(
                f"SELECT count(*) FROM onefold_records WHERE key = '{self.key}' AND {condition}".encode()
            ).fetchone()
        return int(found[0]) if found else 0

    def joined(self, connection: Any, chance: random.Random) -> bool:
        """Whether it ran. A serialization failure is an answer, too: it is to be tried again."""
        within = self.joining.within(connection)
        with suppress(psycopg.errors.SerializationFailure):
            if chance.random() < 0.5:
                return bool(within.fresh("charge", [self.key], key=str).new)
            return not within.run("charge", self.key, lambda: chance.choice([None, 1]), keep="1h").replayed
        return False

    def told(self, number: int) -> None:
        chance = random.Random(number)
        self.key = f"k{number}"
        events = chance.choices(self.events, k=chance.randrange(2, 8))
        snapshot = chance.randrange(len(events) + 1)
        claim = chance.randrange(snapshot, len(events) + 1)
        with psycopg.connect(self.url) as connection:
            connection.isolation_level = chance.choice(LEVELS)
            for at in range(len(events) + 1):
                if at == snapshot:
                    connection.execute("SELECT count(*) FROM pg_class")
                if at == claim:
                    was_alive = self.count(ALIVE)
                    ran = self.joined(connection, chance)
                    assert not (ran and was_alive), f"story {number}: it ran twice"
                    connection.commit() if ran else connection.rollback()
                if at < len(events):
                    events[at]()
        assert self.count("true") <= 1, f"story {number}: two records"


@pytest.fixture
def story(postgres_url: str) -> Iterator[Story]:
    found = Story(postgres_url)
    found.guard.run("charge", "other", lambda: 1)
    yield found
    found.guard.close()
    found.joining.close()


@pytest.mark.parametrize("stories", [range(15), pytest.param(range(15, 230), marks=pytest.mark.more)])
def test_whatever_happens_between_snapshot_and_claim_a_key_runs_once(story: Story, stories: range) -> None:
    for number in stories:
        story.told(number)
        story.expires(LONG_AGO)
