"""Retention that is checked: the configuration file, and the lint that reads it. See `docs/retention.md`."""

from onefold.retention._shape import schema
from onefold.retention.configuration import Configuration, Problem, Unusable, read
from onefold.retention.guards import AsyncGuards, Guards
from onefold.retention.lint import RULES, Finding, findings, floor

__all__ = [
    "AsyncGuards",
    "Configuration",
    "Finding",
    "Guards",
    "Problem",
    "RULES",
    "Unusable",
    "findings",
    "floor",
    "read",
    "schema",
]
