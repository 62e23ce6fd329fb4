"""What would have happened without Onefold: `Absorbed` writes down duplicates, and `onefold report` adds them up."""

from __future__ import annotations

from onefold.report.absorbed import Absorbed

__all__ = ["Absorbed"]
