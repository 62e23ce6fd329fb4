"""Identify the account and the caller of a request from its headers.

Never use anything that may change between two runs of a handler for the same request: a renewed token, a signature, a
trace id, the version of a client. A key that changes with them would be a second charge.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Final

import msgspec

# A header with one of these words in its name identifies the account: Stripe-Account, X-Tenant-Id, X-User-Id.
FOR_WHOM: Final = re.compile(
    "(^|[-_])(account|company|customer|merchant|org|organi[sz]ation|project|shop|store|subaccount|team|tenant|user|"
    "workspace)(id)?($|[-_])"
)

# Unless it has one of these, too: User-Agent, X-User-Token, X-Account-Signature, X-User-Request-Id.
NOT_FOR_WHOM: Final = re.compile(
    "(^|[-_])(agent|assertion|auth|authorization|correlation|data|date|expires|host|info|ip|jwt|key|nonce|password|"
    "request|secret|session|signature|span|telemetry|time|timestamp|token|trace|version)($|[-_])"
)

# Stripe's successor of Stripe-Account.
ALSO_FOR_WHOM: Final = frozenset({"stripe-context"})

# The headers that identify a caller.
CREDENTIALS: Final = ("authorization", "x-api-key", "api-key")

# Schemes whose value is the same for each request. Others (AWS, OAuth 1, Digest) create a new one each time.
FIXED_SCHEMES: Final = frozenset({"bearer", "token", "apikey", "api-key"})

# The claims of a JSON Web Token that a new token repeats.
CLAIMS: Final = ("iss", "sub", "client_id", "azp")

JWT_PARTS: Final = 3


def for_whom(headers: Mapping[str, str]) -> str:
    """Return the headers that identify the account, in one string: `stripe-account: acct_1`. Empty if none."""
    found = {name.lower(): value for name, value in headers.items() if _says_for_whom(name.lower())}
    return ", ".join(f"{name}: {found[name]}" for name in sorted(found))


def caller(headers: Mapping[str, str]) -> str:
    """Return a digest of the caller's credentials. Empty if they do not tell callers apart."""
    found = [_credential(name.lower(), value) for name, value in headers.items() if name.lower() in CREDENTIALS]
    known = sorted(one for one in found if one)
    return hashlib.sha256("\n".join(known).encode(errors="surrogatepass")).hexdigest() if known else ""


def _says_for_whom(name: str) -> bool:
    return name in ALSO_FOR_WHOM or bool(FOR_WHOM.search(name) and not NOT_FOR_WHOM.search(name))


def _credential(name: str, value: str) -> str:
    if name != "authorization":
        return f"{name} {value}"
    scheme, _, rest = value.strip().partition(" ")
    if scheme.lower() == "basic":
        # Passwords change from time to time.
        return f"basic {_decoded(rest).partition(b':')[0]!r}"
    if scheme.lower() not in FIXED_SCHEMES:
        return ""
    parts = rest.strip().split(".")
    return _claims(parts[1]) if len(parts) == JWT_PARTS else f"token {rest.strip()}"


def _claims(payload: str) -> str:
    try:
        claims = msgspec.json.decode(_decoded(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    stable = {name: claims[name] for name in CLAIMS if name in claims} if isinstance(claims, dict) else {}
    return f"claims {msgspec.json.encode(stable).decode()}" if stable else ""


def _decoded(text: str) -> bytes:
    """Decode either alphabet of base64, with or without its padding."""
    plain = text.strip().rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4))
    except (binascii.Error, ValueError):
        return b""
