"""Tables of other versions of Onefold, as seen from the version of this code."""

from __future__ import annotations

from typing import Final

from onefold.stores.sql.records import VERSION

TOO_NEW: Final = f"UPDATE onefold_schema SET version = {VERSION + 2}, usable_from = {VERSION + 1}"
STILL_USABLE: Final = f"UPDATE onefold_schema SET version = {VERSION + 1}, usable_from = {VERSION}"

# How tables that are too new are refused.
REFUSED: Final = f"version {VERSION + 2}, but this Onefold only knows version {VERSION}"
