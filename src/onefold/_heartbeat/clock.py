"""The worker's own monotonic clock. In a place of its own, so that a test can move it."""

from __future__ import annotations

from time import monotonic

__all__ = ["monotonic"]
