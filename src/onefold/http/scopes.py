"""Identify the caller of a request. There is no default: a wrong one shows one tenant another's response.

A credential is stored as a keyed digest, never in plain text.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from typing import Final

from onefold import UsageError
from onefold.http._shared.messages import Refused, Request
from onefold.http._shared.options import header_name

ScopeOf = Callable[[Request], str | None]

# Separates our digests from any other use of the same credential. It is not a secret: pass one with `secret=`.
LABEL: Final = b"onefold scope"

# 128 bits: two callers never share one.
DIGEST_BYTES: Final = 16

# The limit of BLAKE2.
SECRET_MAX: Final = 64

# The name of a user without an id: Flask-Login's `get_id` writes `str(None)`, and so do functions of many projects.
NOBODY: Final = ("", "None")


def by_header(name: str, *, secret: str | bytes = b"") -> ScopeOf:
    """Identify the caller by this credential: `by_header("X-Api-Key")`. A request without it is refused.

    `secret` is the key of the digest. Pass one if credentials are short enough to be guessed, and keep it: with another
    one every record is a stranger's.
    """
    header_name("by_header", name)
    if not isinstance(secret, (str, bytes)):
        raise UsageError(f"secret= has to be a str or bytes, not {type(secret).__name__}")
    key = secret.encode() if isinstance(secret, str) else secret
    if len(key) > SECRET_MAX:
        raise UsageError(f"secret= has {len(key)} bytes, and the limit is {SECRET_MAX}")

    def of(request: Request) -> str | None:
        values = request.headers(name)
        if len(values) > 1:
            raise Refused("caller_unknown", f"{name} was sent {len(values)} times: send it once")
        credential = values[0].strip() if values else b""
        if not credential:
            raise Refused("caller_unknown", f"a request with a key needs {name}, which says whose key it is")
        return hashlib.blake2b(LABEL + credential, digest_size=DIGEST_BYTES, key=key).hexdigest()

    return of


def single_tenant(_request: Request) -> str | None:
    """Treat every caller as the same: anyone who knows a key gets its response. Only for a service with one client."""
    return None


def name_of(caller: object, source: str, instead: str) -> str:
    """Return the name of a caller: a string, an integer or a UUID. Raises `UsageError` for any other object.

    The text of most objects is their address in memory, or changes with their content: a retry would look like a
    stranger's, and a stranger might be taken for the caller. Raises `Refused` for a caller without an id: all of them
    would be one.
    """
    if caller is None or (isinstance(caller, str) and caller.strip() in NOBODY):
        raise Refused("caller_unknown", "A request with a key needs a caller, but this one has no id.")
    if isinstance(caller, (str, int, uuid.UUID)) and not isinstance(caller, bool):
        return str(caller)
    raise UsageError(f"{source} has to be a str, an int or a UUID, not {type(caller).__name__}. {instead}")
