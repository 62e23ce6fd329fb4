"""What the pools for threads and for tasks share: their bounds, and what they say when there is no connection."""

from __future__ import annotations

from typing import Any, Final

from onefold.durations import as_text
from onefold.stores.sql.connection import TransactionStatus

# On Python 3.11 accessing an enum's members is slow.
IDLE: Final = TransactionStatus.IDLE

# The maximum of concurrent transactions; a server has room for some hundred connections in all.
SIZE: Final = 10

# How long an operation waits for a connection: as long as a lease, because a longer wait would lose the claim.
PATIENCE: Final = 30.0

# Kept from the garbage collector, which would close what belongs to another process.
inherited: list[Any] = []


def all_in_use(size: int, patience: float) -> str:
    return (
        f"all {size} connections to the database have been in use for {as_text(patience)}. Nothing ran. Keep "
        "transactions short, or raise pool_size"
    )
