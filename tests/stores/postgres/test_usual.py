"""The short statements for usual records answer as the long ones do: new, known, expired, written by another."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from onefold._model import Address, Close, Ending, Entry, Record, State
from onefold.stores.postgres import PostgresStore, open_store
from onefold.stores.postgres.dialect import POSTGRES
from onefold.stores.postgres.statements import usual as statements
from tests.stores.postgres.tools import another
from tests.support import eventually

DONE = Ending(state=State.DONE, ttl=86_400.0)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = open_store(f"{postgres_url}?purge=no")
    yield store
    store.close()


def entry(key: str, **fields: Any) -> Entry:
    usual: dict[str, Any] = {"address": Address("", "charge", key), "token": os.urandom(16), "lease": 30.0, "ttl": 60.0}
    return Entry(**(usual | fields))


def expire(url: str, key: str) -> None:
    with another(url) as connection:
        connection.execute("UPDATE onefold_records SET expires = 1 WHERE key = %s", [key])


def waiting(connection: psycopg.Connection[Any]) -> bool:
    (count,) = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() or (0,)
    return bool(count)


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE])
def test_a_claim_and_a_batch_of_them_find_what_is_there(store: PostgresStore, postgres_url: str, state: State) -> None:
    known, finished = entry("known", fingerprint=b"\0\xff"), entry("finished")
    store.claim_all([known, finished, entry("expired"), entry("expired too")])
    store.close_all([Close(finished.as_claim(), DONE)])
    for key in ("expired", "expired too"):
        expire(postgres_url, key)
    batch = [entry(key, state=state) for key in ("new", "known", "finished", "expired", "newer")]

    answers = store.claim_all([*batch[:3], known, *batch[3:]]), store.claim_all(batch[::-1])
    alone = [store.claim(entry(key, state=state)) for key in ("new", "known", "alone", "expired too")]

    for one in (answers[0][1], alone[1]):
        assert isinstance(one, Record)
        assert (one.token, one.fingerprint, one.state) == (known.token, b"\0\xff", State.RUNNING)
    # The same address twice: as by the long statement.
    assert [one is None for one in answers[0]] == [True, False, False, True, True, True]
    ended = answers[0][2]
    assert isinstance(ended, Record)
    assert ended.state is State.DONE
    # Its own token has succeeded.
    assert [one is None for one in answers[1]] == [True, True, False, False, True]
    assert [one is None for one in alone] == [False, False, True, True]
    read = store.read(batch[3].address)
    assert read is not None
    assert (read.token, read.state, read.revision, read.lease_left > 0) == (
        batch[3].token,
        state,
        1,
        state is State.RUNNING,
    )


@pytest.mark.parametrize("many", [False, True])
def test_a_record_that_was_written_while_it_waited_is_found_by_a_second_look(
    store: PostgresStore, postgres_url: str, *, many: bool
) -> None:
    """At READ COMMITTED a statement does not see what was committed after it began."""
    store.claim(entry("table"))
    found: list[Any] = []

    def claim() -> None:
        found.extend(store.claim_all([entry("raced"), entry("new")]) if many else [store.claim(entry("raced"))])

    with another(postgres_url) as first, another(postgres_url) as watcher:
        first.execute("BEGIN")
        first.execute(
            "INSERT INTO onefold_records (scope, operation, key, state, attempt, began, changed, remark, revision, "
            "token) VALUES ('', 'charge', 'raced', 'done', 1, 1, 1, '', 1, 'theirs')"
        )
        claiming = threading.Thread(target=claim)
        claiming.start()
        assert eventually(lambda: waiting(watcher))
        first.execute("COMMIT")
        claiming.join()

    assert found[0].token == b"theirs"
    assert found[1:] == ([None] if many else [])


def test_a_batch_goes_by_the_short_statement_only_if_it_shares_all_but_keys_tokens_and_fingerprints() -> None:
    usual = [entry("a"), entry("b", fingerprint=b"f")]
    others = [entry("c", ttl=61.0), entry("c", attempt=2), entry("c", state=State.DONE), entry("a")]
    others.append(entry("c", address=Address("tenant", "charge", "c")))

    assert next(POSTGRES.claim_all(usual)) == statements.writing_all(usual)
    for other in others:
        request = next(POSTGRES.claim_all([*usual, other]))
        assert request.statement == POSTGRES.insert_all(usual).statement  # type: ignore[union-attr]
    with pytest.raises(StopIteration):
        next(POSTGRES.claim_all([]))
