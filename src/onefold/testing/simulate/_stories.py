"""Describe events for people."""

from __future__ import annotations

from typing import Final

from onefold._delivery.steps import Claiming, StoreStep
from onefold._model import State
from onefold.stores.memory import Row
from onefold.testing.simulate._scenario import NOW
from onefold.testing.simulate._worker import Choose, Effect, End, Moment, Waits

FAULTS: Final = {
    "no answer": ": the store does not answer",
    "answer lost": ": done, but the answer is lost",
    "sent twice": ": the answer is lost, and the client library sends it again",
    "arrives late": ": gives up waiting, the request is still under way",
    "conflict": ": a serialization failure",
}


# The prefix of the ways in which a task is cancelled.
CANCELLED: Final = "is cancelled"


def told(who: str, moment: Moment, way: str, then: Moment | None, rows: tuple[Row | None, Row | None] | None) -> str:
    """Write one line of a story: who did what, what happened to the record (`rows`, before and after), how it ended."""
    what = _done_at(moment, way)
    if way == "dies":
        return f"{who} dies before it {what}"
    line = f"{who} {what}{f', and {way}' if way.startswith(CANCELLED) else FAULTS.get(way, '')}"
    if rows is not None and rows[0] != rows[1]:
        line += f" [{_seen(rows[1])}]"
    elif rows is not None and isinstance(moment, StoreStep) and way == "goes on":
        line += " [nothing changed]"
    return f"{line}; it {then.story}" if isinstance(then, End) else line


def _done_at(moment: Moment, way: str) -> str:
    if way == "beats":
        return "sends a heartbeat"
    if isinstance(moment, Claiming):
        verb = "claims" if moment.replacing is None else "takes over"
        if moment.replacing is not None and moment.replacing.token == moment.entry.token:
            verb = "counts the start"
        return verb if moment.entry.state is State.RUNNING else f"writes {moment.entry.state}"
    if isinstance(moment, Waits):
        return way if way != "dies" else "is woken"
    if isinstance(moment, Choose):
        return f"sees that {moment.what} {way}" if way != "dies" else "ends its handler"
    verbs = {"Reading": "looks", "Finishing": "finishes", "Releasing": "releases", "Extending": "writes down its step"}
    verbs |= {"Annotating": "counts a duplicate", "Pause": "waits", "Tells": "tells the others"}
    verbs |= {"Start": "starts the handler", "Watched": "is watched by its heartbeat"}
    verbs |= {"Returned": "goes on after its step"}
    verbs |= {"LeaseLeft": "looks at its lease", "Beginning": "begins", "Committing": "commits"}
    if isinstance(moment, Effect):
        return f"does the step {moment.step!r}" if moment.step else "does the effect"
    return verbs.get(type(moment).__name__, type(moment).__name__.lower())


def _seen(row: Row | None) -> str:
    if row is None:
        return "no record"
    lease = "" if row.state is not State.RUNNING or row.is_live(NOW) else ", lease over"
    # A moved record has a derived token, which is not text.
    token = row.token.decode() if row.token.isascii() else f"token {row.token.hex()[:6]}"
    return f"{row.state}, {token}, revision {row.revision}{lease}"
