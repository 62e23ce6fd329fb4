"""The worker's own monotonic clock, in a module of its own so that a test can move it."""

from __future__ import annotations

from time import monotonic

__all__ = ["monotonic"]
