"""Convert addresses to Redis keys, and back. Pure.

A key is the prefix, the scope and the operation, each preceded by its length, and the key: readable, and unambiguous.
It has no hash tag: each record is alone, wherever its slot is.
"""

from __future__ import annotations

from typing import Final

from onefold._model import Address

# No UTF-8 text begins with this byte.
UUID_MARK: Final = b"\xff"
UUID_SIZE: Final = 36


class Keys:
    """Converts addresses to Redis keys, and back."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()

    def of(self, address: Address) -> bytes:
        scope, operation = address.scope.encode(), address.operation.encode()
        # Neither has more than 255 bytes. Length prefixes leave no separator to be confused.
        return b"%b%c%b%c%b%b" % (self.prefix, len(scope), scope, len(operation), operation, _packed(address.key))

    def address(self, key: bytes) -> Address | None:
        """Return the address of one of our keys; None for a foreign key that happens to begin with our prefix."""
        scope_at = len(self.prefix) + 1
        try:
            operation_at = scope_at + key[scope_at - 1] + 1
            key_at = operation_at + key[operation_at - 1]
            scope, operation = key[scope_at : operation_at - 1].decode(), key[operation_at:key_at].decode()
            return Address(scope, operation, _unpacked(key[key_at:])) if key[key_at:] else None
        except (IndexError, UnicodeDecodeError):
            return None

    def pattern(self, scope: str | None, operation: str | None) -> bytes:
        """Return the pattern for SCAN. Scope and operation narrow it from the left."""
        known = self.prefix
        for part in (scope, operation):
            if part is None:
                break
            encoded = part.encode()
            known += b"%c%b" % (len(encoded), encoded)
        return b"".join(b"\\%c" % byte if byte in b"*?[]^\\" else b"%c" % byte for byte in known) + b"*"


def _packed(key: str) -> bytes:
    """Return the last part of a key.

    A UUID, which most keys are, is stored as its number: it saves a tenth of a record.
    """
    if len(key) == UUID_SIZE:
        try:
            number = bytes.fromhex(key.replace("-", ""))
        except ValueError:
            return key.encode()
        # Another spelling of the same number is another key.
        if _as_uuid(number) == key:
            return UUID_MARK + number
    return key.encode()


def _unpacked(part: bytes) -> str:
    return _as_uuid(part[1:]) if part.startswith(UUID_MARK) else part.decode()


def _as_uuid(number: bytes) -> str:
    digits = number.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
