"""PostgreSQL that fails over: each strike moves the primary, in one of the ways in which primaries are lost.

With a synchronous standby nothing may be lost. With an asynchronous one something is, and how much is counted: there
the standby is made to lag before the primary dies, as one does that is far away or busy.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

from bench.soak.effects import Ledger
from bench.soak.environments import Room
from services import postgres
from services.patroni import SETTLE_SECONDS_MAX, Cluster, Node, end_receiver
from services.processes import ServerFailed, wait_until

# A frozen server takes a connection and does not answer: the next one is tried after this.
CONNECT_SECONDS: Final = 4

# How far a standby is behind when its primary dies: some hundred deliveries.
LAG_BYTES: Final = 100_000
LAG_SECONDS_MAX: Final = 30.0

_LAG: Final = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), flush_lsn) FROM pg_stat_replication"


class FailingOver:
    """Two PostgreSQL servers under Patroni; the environment of one store."""

    has_server = True

    def __init__(self, cluster: Cluster) -> None:
        kind = "synchronous" if cluster.synchronous else "asynchronous"
        self.title = f"patroni, PostgreSQL {cluster.version}, {kind} standby"
        self.loses = not cluster.synchronous
        self._cluster = cluster
        ways = (self._kill, self._switch_over, self._freeze)
        self._ways = cycle(ways)
        self._bring_back: Callable[[], None] = lambda: None

    def room(self, folder: Path) -> Room:  # noqa: ARG002 - nothing of it lies in the run's own folder
        import psycopg

        self._cluster.settle()
        url = postgres.Database(self._cluster).url
        patient = f"{url}&connect_timeout={CONNECT_SECONDS}&pool_timeout={SETTLE_SECONDS_MAX:.0f}s"
        return Room(patient, Ledger(partial(psycopg.connect, url, connect_timeout=CONNECT_SECONDS), "%s"))

    def kill(self) -> None:
        """Lose the primary in the next way; another one leads when this returns."""
        next(self._ways)()

    def restart(self) -> None:
        """Bring the old primary back. It follows the new one when this returns."""
        self._bring_back()
        self._cluster.settle()

    def _kill(self) -> None:
        receiver = self._lag() if self.loses else None
        old = self._cluster.primary
        self._bring_back = old.daemon.start
        old.daemon.kill()
        if receiver is not None:
            end_receiver(receiver)
        self._cluster.replaced(old)

    def _lag(self) -> int:
        receiver = self._cluster.stop_receiving()
        # Where nobody writes any more there is nothing to lose.
        with contextlib.suppress(ServerFailed), postgres.connected(self._cluster.url) as connection:
            wait_until(lambda: connection.execute(_LAG).fetchone()[0] > LAG_BYTES, "no lag", LAG_SECONDS_MAX)
        return receiver

    def _switch_over(self) -> None:
        self._bring_back = lambda: None
        self._cluster.switch_over()

    def _freeze(self) -> None:
        old: Node = self._cluster.freeze_primary()
        self._bring_back = old.daemon.cont

    def leave_evidence(self, folder: Path) -> None:
        for daemon in self._cluster.daemons:
            shutil.copy(daemon.log, folder / f"{daemon.name}.log")
