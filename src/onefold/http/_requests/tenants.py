"""Join the scope of a guard and the caller of a request into the scope of a record. Pure.

No two pairs share a record, and none shares one with a caller of a guard that has no scope of its own.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from onefold.keys import SCOPE_MAX

# The length of the guard's scope comes first, so that no character of a name can be mistaken for its end.
_LENGTH: Final = re.compile(r"(0|[1-9][0-9]{0,2}):")

# Separates the digest of a long pair from every other use of the same names.
_LABEL: Final = b"onefold tenant and caller 1 "

# 256 bits: callers choose their names, and must not be able to search for a collision.
_DIGEST_BYTES: Final = 32


def joined(tenant: str, caller: str | None) -> str | None:
    """Return `8:tenant-a/asha` for asha of tenant-a. With an empty `tenant`, a guard without a scope, the caller stays.

    `caller` is None if all are the same: `8:tenant-a/`. A pair that is too long for a scope becomes `0:#` and a digest.
    """
    if not tenant and (caller is None or not _is_joined(caller)):
        return caller
    text = f"{len(tenant)}:{tenant}/{caller or ''}"
    whole = text.encode("utf-8", "surrogatepass")
    if len(whole) <= SCOPE_MAX:
        return text
    return "0:#" + hashlib.blake2b(_LABEL + whole, digest_size=_DIGEST_BYTES).hexdigest()


def _is_joined(caller: str) -> bool:
    """Return whether a plain caller's name looks like a result of `joined`: it must not pass for one."""
    found = _LENGTH.match(caller)
    if found is None:
        return False
    length, rest = int(found[1]), caller[found.end() :]
    return rest[length : length + 1] == "/" or (length == 0 and rest.startswith("#"))
