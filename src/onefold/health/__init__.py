"""The doctor: find problems with a store.

`examine(store)` asks a store for its facts, tries it out, and judges. Asking and judging are separate: the judgements
are pure functions of facts. It never shows a key or a password, and leaves nothing behind in the store.
"""

from onefold.health.examine import examine
from onefold.health.report import Check, Grade, Report

__all__ = ["Check", "Grade", "Report", "examine"]
