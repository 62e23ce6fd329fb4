"""What a store has lost that may lose: counted and said, where elsewhere it would be a violation.

Every message was acknowledged. What has to hold even so: a credit and its record are there together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.soak.plan import Plan

if TYPE_CHECKING:
    from bench.soak.verdict import Found


def inconsistent(plan: Plan, found: Found, id_: str) -> Iterator[str]:
    """What no loss explains about this message."""
    if plan.mode != "transactional":
        # Under hold, what was struck before its effect waits for a person.
        if not found.calls[id_] and (plan.mode == "rerun" or found.states.get(id_) == "done"):
            yield "its effect outside, which no store can lose, did not happen"
        if found.charges[id_] > 1:
            yield "downstream, its key is not one"
        return
    if found.calls[id_] > 1:
        yield "its effect happened twice"
    if bool(found.calls[id_]) != (found.states.get(id_) == "done"):
        yield "its effect and its record are not lost together"


def losses(plan: Plan, found: Found) -> dict[str, str]:
    """The counts, as rows of the table."""
    ids = [message.id for message in plan.messages]
    return {
        "acknowledged, its record lost": f"{sum(id_ not in found.states for id_ in ids):,}",
        "acknowledged, its effect lost": f"{sum(not found.calls[id_] for id_ in ids):,}",
        "effects that happened again": f"{sum(max(found.calls[id_] - 1, 0) for id_ in ids):,}",
    }


def told(plan: Plan, found: Found) -> str:
    """The same in one sentence."""
    ids = [message.id for message in plan.messages]
    gone, again = sum(id_ not in found.states for id_ in ids), sum(found.calls[id_] > 1 for id_ in ids)
    if plan.mode == "transactional":
        return f"{gone:,} of {len(ids):,} acknowledged credits are lost, each together with its record; none came twice"
    return (
        f"{gone:,} of {len(ids):,} acknowledged deliveries have lost their record: a duplicate of one runs again; "
        f"the effects of {again:,} happened more than once"
    )
