"""What strikes, and when: workers are killed and stopped, the server is killed and comes back.

Nothing is struck in the last tenth of a run, so that a strike always finds somebody at work.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from typing import Final, Literal, NamedTuple

from bench.soak.environments import Environment
from bench.soak.plan import Plan

# How long a worker is stopped, in leases: past its own, and past the redelivery that takes its message over.
STOPPED: Final = 1.4


class Strike(NamedTuple):
    """What comes after so many acknowledgements; `leases` is how long it lasts."""

    after: int
    kind: Literal["kill", "stop", "server"]
    leases: float = 0.0


def planned(plan: Plan, chance: random.Random) -> deque[Strike]:
    size = plan.size

    def some_time(first: int = 0) -> int:
        return chance.randrange(size.deliveries * first // 10, size.deliveries * 9 // 10)

    strikes = [Strike(some_time(), "kill") for _ in range(size.kills)]
    # Nobody is stopped inside a transaction on purpose: it would only stop all others too.
    if plan.mode != "transactional":
        strikes += [Strike(some_time(), "stop", STOPPED) for _ in range(size.stops)]
    if plan.strikes_server:
        # Not before there is something that it could lose.
        strikes += [Strike(some_time(first=2), "server", leases) for leases in size.outages]
    return deque(sorted(strikes))


class Outages:
    """When the server was away: from its kill until it answered again.

    A thread strikes it, so that the queue goes on delivering meanwhile. Nobody may fork before that has ended.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._past: list[tuple[float, float]] = []
        self._began = math.inf
        self._striking: threading.Thread | None = None
        self._problem: Exception | None = None

    def begin(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._striking = threading.Thread(target=self._strike, args=(seconds,), daemon=True)
        self._striking.start()

    def _strike(self, seconds: float) -> None:
        try:
            # A server that waits for its disk takes a moment to die: only then it is away.
            self._environment.kill()
            time.sleep(seconds)
            self._environment.restart()
        except Exception as error:  # noqa: BLE001 - raised where the queue looks
            self._problem = error

    def look(self) -> None:
        """Note the end of an outage; whatever kept the server from coming back is raised."""
        if self._striking is not None and not self._striking.is_alive():
            self.wait()

    def wait(self) -> None:
        """Until the server is back, if it is away."""
        if self._striking is None:
            return
        self._striking.join()
        self._past.append((self._began, time.monotonic()))
        self._began, self._striking = math.inf, None
        if self._problem is not None:
            raise self._problem

    @property
    def is_away(self) -> bool:
        return self._striking is not None

    @property
    def seconds(self) -> float:
        return sum(ended - began for began, ended in self._past)

    def touched(self, began: float, ended: float) -> bool:
        """Whether the server was away at some moment of this time."""
        return ended >= self._began or any(began <= back and ended >= away for away, back in self._past)
