"""A purge that is struck after any of its messages leaves all that is alive, and the next one goes on."""

from __future__ import annotations

from contextlib import suppress

import pytest

from onefold import Held, OutcomeUnknown
from onefold.errors import StoreUnavailable
from onefold.stores.postgres import open_store
from services.proxy import Proxy
from tests.stores.postgres.partitions.tools import expire, guard_on, made_old, partitioned, seal, sealed
from tests.stores.postgres.tools import rows

# Look, seal, look, move, look, drop, look, and delete; with the messages that open a connection.
MESSAGES = 14


def unknown() -> None:
    raise OutcomeUnknown("it may have happened")


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[] if number in (6, 8) else pytest.mark.more) for number in range(1, MESSAGES)],
)
def test_a_purge_that_is_struck_loses_nothing(postgres_url: str, number: int) -> None:
    with guard_on(postgres_url) as guard:
        guard.run("charge", "over", lambda: 1)
        guard.run("charge", "forever", lambda: 1, keep="forever")
        with pytest.raises((OutcomeUnknown, Held)):
            guard.run("charge", "held", unknown, after_crash="hold")
        seal(postgres_url)
        guard.run("charge", "alive", lambda: 1)
        expire(postgres_url, "key = 'over'")
        made_old(postgres_url)

        with Proxy(postgres_url) as proxy:
            store = open_store(partitioned(proxy.url()))
            proxy.lose_reply(number)
            with suppress(StoreUnavailable):
                store.purge(10)
            store.close()
        for _ in range(3):
            guard.store.purge(10)

        assert [guard.run("charge", key, lambda: 2).replayed for key in ("forever", "alive")] == [True, True]
        with pytest.raises(Held):
            guard.run("charge", "held", lambda: 2)
    kept = rows(postgres_url, "SELECT key, count(*) FROM onefold_records GROUP BY key ORDER BY key")
    assert kept == [("alive", 1), ("forever", 1), ("held", 1)]
    assert len(sealed(postgres_url)) == 1
