"""The operation of the records that keep intents. The client writes them; the command line knows them by it.

In a module of its own, because the client itself needs packages that the command line does without.
"""

from __future__ import annotations

from typing import Final

OPERATION: Final = "onefold-intent"
