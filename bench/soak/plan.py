"""What a run is: how much of everything, which messages in which order, under which policy. Pure data."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Final, Literal, NamedTuple

from onefold import Policy

Mode = Literal["transactional", "rerun", "hold"]

WORKERS: Final = 8
ACCOUNTS: Final = 20


class Size(NamedTuple):
    """How much of everything."""

    deliveries: int
    messages: int
    kills: int
    stops: int
    # Longer than eight writers wait for one file, so that leases end by kills and stops and not in a queue. Whoever
    # outlives one all the same is told, and counted.
    lease: float
    # How long the server is left dead each time it is struck, in leases: once so short that a claim outlives it, once
    # longer than any claim does.
    outages: tuple[float, ...]


FULL: Final = Size(deliveries=20_000, messages=14_000, kills=40, stops=8, lease=1.5, outages=(0.0, 1.2))
SHORT: Final = Size(deliveries=2_000, messages=1_400, kills=8, stops=2, lease=0.6, outages=(1.2,))

# Where primaries fail over: killed, moved, frozen. A fail-over takes longer than any lease.
FULL_FAILOVER: Final = Size(deliveries=6_000, messages=4_200, kills=12, stops=2, lease=1.5, outages=(0.0, 0.0, 0.0))
SHORT_FAILOVER: Final = FULL_FAILOVER._replace(deliveries=2_000, messages=1_400, kills=4)

# Where tasks are cancelled, for each of the eight async drivers: 14,000 messages in all.
FULL_CANCEL: Final = Size(deliveries=2_500, messages=1_750, kills=6, stops=0, lease=1.5, outages=())
SHORT_CANCEL: Final = Size(deliveries=150, messages=105, kills=1, stops=0, lease=0.6, outages=())


class Message(NamedTuple):
    id: str
    account: str
    amount: int


class Plan(NamedTuple):
    """One run: what is delivered, in which mode, and where its files are."""

    store: str
    mode: Mode
    size: Size
    seed: int
    folder: Path
    guarded: bool
    strikes_server: bool
    seconds_max: float
    # The async driver whose tasks are cancelled; none where workers block.
    driver: str = ""

    @property
    def messages(self) -> list[Message]:
        chance = random.Random(self.seed)
        return [
            Message(f"m-{number:05}", account(chance.randrange(ACCOUNTS)), chance.randint(1, 100))
            for number in range(self.size.messages)
        ]

    @property
    def deliveries(self) -> list[Message]:
        """Every message once and some again: half of the duplicates at any time, half right behind their original."""
        chance, messages = random.Random(self.seed + 1), self.messages
        again = chance.choices(messages, k=self.size.deliveries - len(messages))
        late, at_once = again[::2], Counter(again[1::2])
        shuffled = [(message, 1 + at_once.pop(message, 0)) for message in messages]
        shuffled += [(message, 1) for message in late]
        chance.shuffle(shuffled)
        return [message for message, times in shuffled for _ in range(times)]

    @property
    def policy(self) -> Policy:
        if self.mode == "transactional":
            return Policy(keep="forever")
        # No message can be hit so often that its attempts are used up.
        attempts = 1 + self.size.kills + self.size.stops + len(self.size.outages) + WORKERS
        return Policy(keep="forever", lease=self.size.lease, after_crash=self.mode, max_attempts=attempts)

    @property
    def journal(self) -> Path:
        """One line for each start of a handler, in claim mode."""
        return self.folder / "starts.log"


def account(number: int) -> str:
    return f"account-{number:02}"
