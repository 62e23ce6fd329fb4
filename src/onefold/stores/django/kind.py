"""Django's description, for modules that know no store."""

from __future__ import annotations

from typing import Final

from onefold.stores.kinds import StoreKind

KIND: Final = StoreKind(name="Django", has_transactions=True)
