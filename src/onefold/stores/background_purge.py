"""Purge a little after some deliveries, so that a table stays bounded without a schedule.

After about one delivery in `ONE_IN`, chosen at random, a store removes up to `BATCH` expired records: more than were
written in the meantime, so any backlog shrinks. Random, because a counter would start over in every process, and a
process that handles ten deliveries and ends, or a child that is forked for each, would never reach its turn.

It never runs in a caller's transaction, and its errors never fail a delivery. After deliveries in a caller's
transaction it runs after the caller's commit, if the library that commits tells us of it: Django and SQLAlchemy's
sessions do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qs, urlsplit

from onefold._checks import YES_OR_NO

# Below one in a hundred, so that it does not affect the p99 of a delivery.
ONE_IN: Final = 200

# 2.5 times what was written in the meantime. On a database server it takes a few milliseconds.
BATCH: Final = 500

_RANDOM_BYTES: Final = 4

# The words of a URL's option that turn it off.
OFF: Final = frozenset(word for word, wanted in YES_OR_NO.items() if not wanted)


def batches_due(ended: int) -> int:
    """Return how many batches to remove now, after this many deliveries have ended."""
    whole, rest = divmod(ended, ONE_IN)
    return whole + (rest > 0 and chance() < rest)


def chance(random: bytes = b"") -> int:
    """Return a number below `ONE_IN`. Not from `random`: the application may have seeded it.

    Whoever has random bytes at hand, such as a claim's token, passes them: a system call takes longer than all else.
    """
    return int.from_bytes(random[:_RANDOM_BYTES] or os.urandom(_RANDOM_BYTES)) % ONE_IN


def is_switched_off(store: object) -> bool:
    """Return whether a store, or the URL of one that is not opened yet, was told not to purge."""
    if isinstance(store, str):
        return parse_qs(urlsplit(store).query).get("purge", ["yes"])[-1].lower() in OFF
    return getattr(store, "purges", True) is False


@contextmanager
def ignore_errors(store: str) -> Iterator[None]:
    """Log and ignore errors: the delivery has already succeeded, and the next purge tries again."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        logging.getLogger("onefold").debug("%s: the background purge failed: %s", store, error)
