"""An autovacuum holds a lock for as long as it takes; PostgreSQL ends it for whoever waits long enough."""

from __future__ import annotations

import pytest

from onefold.stores.postgres.partitions.dialect import BACKGROUND_WAIT, PURGE_WAIT
from services.servers import Server
from tests.stores.postgres.partitions.test_large import MANY
from tests.stores.postgres.partitions.tools import guard_on, made_old, sealed
from tests.stores.postgres.tools import another
from tests.support import eventually

# So slow that it does not end by itself; and the server looks soon who is in the way, however busy the machine is.
SLOWLY = (
    "autovacuum_naptime = '1s'",
    "autovacuum_vacuum_cost_delay = '100ms'",
    "autovacuum_vacuum_cost_limit = 1",
    "deadlock_timeout = '100ms'",
)

WORKING = (
    "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'autovacuum worker' AND query ~ 'VACUUM.*onefold_rec'"
)


@pytest.mark.more
def test_a_purge_seals_a_partition_that_is_being_vacuumed(own_postgres: Server) -> None:
    with guard_on(own_postgres.url) as guard, another(own_postgres.url) as connection:
        guard.run("charge", "k", lambda: 1)
        connection.execute(MANY.encode())
        connection.execute("UPDATE onefold_records SET remark = 'x', expires = NULL, due = NULL WHERE key ~ 'many'")
        made_old(own_postgres.url)
        for setting in SLOWLY:
            connection.execute(f"ALTER SYSTEM SET {setting}".encode())
        connection.execute("SELECT pg_reload_conf()")
        assert eventually(lambda: connection.execute(WORKING).fetchone() == (1,)), "nobody vacuums"

        guard.store.purge(10)

    assert len(sealed(own_postgres.url)) == 1


def test_a_purge_waits_for_longer_than_the_server_usually_does_before_it_looks(postgres_url: str) -> None:
    with another(postgres_url) as connection:
        (usual,) = connection.execute(
            "SELECT boot_val::float FROM pg_settings WHERE name = 'deadlock_timeout'"
        ).fetchall()

    assert (milliseconds(BACKGROUND_WAIT) < usual[0], usual[0] < milliseconds(PURGE_WAIT)) == (True, True)


def milliseconds(wait: str) -> float:
    assert wait.endswith("ms")
    return float(wait.removesuffix("ms"))
