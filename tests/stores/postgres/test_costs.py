"""What a delivery on PostgreSQL costs, counted: messages to the server, what a duplicate writes, and Python frames.

The times are in `python -m bench.postgres_parts`; none is asserted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import psycopg
import pytest

from onefold import TX, Guard
from onefold.stores.postgres import joined as postgres_joined
from onefold.stores.postgres.psycopg.pool import PREPARE_AFTER
from tests.stores.postgres.tools import another

ASSIGNED = "SELECT pg_current_xact_id_if_assigned()"

# Messages in a batch.
BATCH = 100


class Costs(NamedTuple):
    messages: int
    frames: int


@pytest.fixture
def guard(postgres_url: str) -> Iterator[Guard]:
    # Where a test before has dropped the tables, each transaction looks for them.
    postgres_joined.looked.clear()
    with Guard(f"{postgres_url}?purge=no") as guard:
        guard.read("credit", "none")
        yield guard


@pytest.fixture
def deliver(guard: Guard, postgres_url: str, request: pytest.FixtureRequest) -> Iterator[Callable[[str], object]]:
    """A delivery in the mode that the test names. Its handler sends nothing."""
    with ExitStack() as stack:
        connection = stack.enter_context(another(postgres_url))

        def within(key: str) -> object:
            with connection.transaction():
                return guard.within(connection).run("credit", key, lambda: None)

        def fresh(key: str) -> object:
            with connection.transaction():
                return guard.within(connection).fresh("credit", [f"{key} {n}" for n in range(BATCH)], key=str)

        @guard.transactional("credit", key="key")
        def transactional(key: str, amount: int, *, tx: Any = TX) -> None:
            pass

        @guard.idempotent("charge", key="key")
        def idempotent(key: str, amount: int) -> None:
            pass

        yield {
            "within": within,
            "fresh": fresh,
            "transactional": lambda key: transactional(key, 4200),
            "idempotent": lambda key: idempotent(key, 4200),
        }[request.param]


def costs(deliver: Callable[[str], object], key: str) -> Costs:
    codes: list[Any] = []

    def profile(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            codes.append(frame.f_code)

    sys.setprofile(profile)
    try:
        deliver(key)
    finally:
        sys.setprofile(None)
    # psycopg waits once for the replies to one message.
    messages = sum(code is psycopg.Connection.wait.__code__ for code in codes)
    ours = sum(f"{os.sep}onefold{os.sep}" in code.co_filename for code in codes)
    return Costs(messages, ours)


# With BEGIN and COMMIT, which are the caller's with `within` and `fresh`. The frames are a tenth above what they are on
# Python 3.11: whoever needs more of them should know it.
@pytest.mark.parametrize(
    ("deliver", "first", "duplicate"),
    [
        ("within", Costs(3, 90), Costs(3, 68)),
        ("fresh", Costs(3, 1_070), Costs(3, 2_070)),
        ("transactional", Costs(2, 145), Costs(2, 122)),
        ("idempotent", Costs(2, 96), Costs(1, 50)),
    ],
    indirect=["deliver"],
)
def test_a_delivery_costs_so_many_messages_and_frames(
    deliver: Callable[[str], object], first: Costs, duplicate: Costs
) -> None:
    for number in range(PREPARE_AFTER + 2):
        deliver(f"before {number}")
        deliver(f"before {number}")

    found = costs(deliver, "new"), costs(deliver, "new")

    for seen, most in zip(found, (first, duplicate), strict=True):
        assert seen.messages == most.messages
        assert seen.frames <= most.frames


def test_a_duplicate_in_a_transaction_writes_nothing_that_its_commit_would_have_to_flush(
    guard: Guard, postgres_url: str
) -> None:
    @guard.transactional("credit", key="key")
    def credit(key: str, *, tx: Any = TX) -> None:
        pass

    credit("known")
    with another(postgres_url) as connection, connection.transaction():
        again = guard.within(connection).run("credit", "known", lambda: None)
        batch = guard.within(connection).fresh("credit", ["known"], key=str)
        after_duplicates = connection.execute(ASSIGNED).fetchone()
        guard.within(connection).run("credit", "new", lambda: None)
        after_a_new_one = connection.execute(ASSIGNED).fetchone()

    assert again.replayed
    assert batch.seen == ["known"]
    assert after_duplicates == (None,)
    assert after_a_new_one != (None,)


def test_each_record_of_a_batch_has_a_token_of_its_own(guard: Guard, postgres_url: str) -> None:
    with another(postgres_url) as connection:
        with connection.transaction():
            guard.within(connection).fresh("credit", range(BATCH), key=str)
        tokens = {bytes(token) for (token,) in connection.execute("SELECT token FROM onefold_records").fetchall()}

    assert len(tokens) == BATCH
    assert {len(token) for token in tokens} == {16}
