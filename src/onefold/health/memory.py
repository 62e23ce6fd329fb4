"""Judge the facts of a store in memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.health.report import Check, green


def judge(_facts: Mapping[str, Any]) -> list[Check]:
    return [green("durability", "in the memory of one process: for tests, and for work that dies with its process")]


def hindrance(_facts: Mapping[str, Any]) -> str | None:
    return None
