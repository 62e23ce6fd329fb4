"""The operation of the records that keep intents. The client writes them; the command line recognizes them by it.

In a module of its own, because the client needs packages that the command line does not.
"""

from __future__ import annotations

from typing import Final

OPERATION: Final = "onefold-intent"
