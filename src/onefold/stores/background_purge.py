"""How a store purges a little as it works, so that its table stays bounded although nobody schedules anything.

After about one delivery in `ONE_IN`, by chance, it removes up to `PORTION` records that are past their stay: more than
were written meanwhile, so that it catches up with whatever there is. Chance, because a count would begin anew in every
process, and one that handles ten deliveries and ends, or a child that is forked for each, would never come to its turn.

Beside the work: it is never done in a transaction of the caller's, and what it meets never fails a delivery.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Below one in a hundred, so that the p99 of a delivery is that of a delivery.
ONE_IN: Final = 200

# 2.5 times what was written meanwhile. On a database server it takes a few milliseconds.
PORTION: Final = 500

_RANDOM_BYTES: Final = 4


def portions(ended: int) -> int:
    """How many portions to remove now, after so many deliveries have ended."""
    whole, rest = divmod(ended, ONE_IN)
    return whole + (rest > 0 and chance() < rest)


def chance() -> int:
    """A number below `ONE_IN`. Not from `random`: those numbers are the application's, which may have seeded it."""
    return int.from_bytes(os.urandom(_RANDOM_BYTES)) % ONE_IN


@contextmanager
def forgiven(store: str) -> Iterator[None]:
    """Whatever goes wrong meanwhile is left to the next purge: the delivery before it has ended well."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        logging.getLogger("onefold").debug("%s: purging a little beside the work failed: %s", store, error)
