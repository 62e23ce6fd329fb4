"""Check a guard's stores once, before the first message or request of an adapter.

An adapter never stops what works. A store that is down is left to the delivery, which waits or refuses as always. A
store that works but loses records, such as a Redis that evicts, is logged as an error. Only a store that cannot be used
as it is set up refuses the message or request, with every problem in one text, until it is set right.
"""

from __future__ import annotations

import logging
from typing import Any, Final
from weakref import WeakKeyDictionary

from onefold import Policy
from onefold._concurrency import forks
from onefold._concurrency.generators import Flow
from onefold.errors import OnefoldError, StoreUnavailable
from onefold.health.startup import StoreProblems
from onefold.stores.base import Inspectable

log = logging.getLogger("onefold")

# A store that is down is looked at again with the next messages, but not forever: each look is a failed connection.
CHECKS_MAX: Final = 10


class FirstUse:
    """Whether the stores of a guard were checked, and what was found."""

    def __init__(self) -> None:
        # Once it is, nothing more is asked: deliveries make their own round trips only.
        self.is_over = False
        # In which process (see `forks`) a check is on its way: in a child that was forked meanwhile, nobody ends it.
        self._busy_in: int | None = None
        self._left = CHECKS_MAX
        self._problem: StoreProblems | None = None

    def check(self, guard: Any, policy: Policy) -> Flow[None]:
        """Check the stores, unless another message is doing it now. Raise `StoreProblems` if nothing can work."""
        if self._busy_in == forks.generation:
            if self._problem is not None and policy.store_down != "run":
                raise self._problem.with_traceback(None)
            return
        self._busy_in = forks.generation
        try:
            # A store of somebody else's reports nothing that could be judged, and is not tried out unasked.
            if isinstance(guard.store, Inspectable):
                yield guard.check
        except StoreUnavailable:
            self._left -= 1
            self.is_over = self._left == 0
        except StoreProblems as problem:
            self._tell(problem)
            self.is_over = problem.works
            # Unprotected work was asked for, if the store cannot be used.
            if not problem.works and policy.store_down != "run":
                raise
        except OnefoldError:
            # A closed guard, a missing driver: the delivery says so.
            return
        except Exception as error:  # noqa: BLE001 - a store of somebody else's may raise anything
            log.warning("%r: its store cannot be checked: it raised %s", guard, type(error).__name__)
            self.is_over = True
        else:
            self.is_over, self._problem = True, None
        finally:
            self._busy_in = None

    def _tell(self, problem: StoreProblems) -> None:
        if self._problem is None or str(self._problem) != str(problem):
            log.error("%s", problem)
        self._problem = problem


_uses: WeakKeyDictionary[Any, FirstUse] = WeakKeyDictionary()


def first_use_of(guard: Any) -> FirstUse:
    """Return the instance that all adapters of a guard share."""
    return _uses.get(guard) or _uses.setdefault(guard, FirstUse())
