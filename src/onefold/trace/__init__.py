"""Find key leaks: each hop logs which key it saw (`Hop`), and `onefold trace` finds the hop that replaced it."""

from __future__ import annotations

from onefold.trace.hops import Hop, digest

__all__ = ["Hop", "digest"]
