"""Run every interleaving of a few workers through the production code.

    from onefold.testing.simulate import Scenario, search

    report = search(Scenario(after_crash="hold", workers=2, faults=2))
    assert report.story is None, report.story

The flows are the ones that guards use, and the store is the production `MemoryStore`; the simulator only chooses when
things happen. `docs/guarantees.md` lists what it proves.
"""

from onefold.testing.simulate._scenario import DEEP, EVERYDAY, Scenario
from onefold.testing.simulate._search import Report, Story, read_code, search, tell
from onefold.testing.simulate._statements import STATEMENTS, Violation
from onefold.testing.simulate._world import Action

__all__ = [
    "DEEP",
    "EVERYDAY",
    "STATEMENTS",
    "Action",
    "Report",
    "Scenario",
    "Story",
    "Violation",
    "read_code",
    "search",
    "tell",
]
