"""Resume a response that breaks off after a part of it was returned: request it again, and continue there.

The server repeats its response under the same key. If it does not begin with the returned part, or has another status
or encoding, it is not the same response: then the error is raised, and nobody gets a mixture of two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from onefold.http.client import _retrying

# An event stream is not repeated: it continues with new events.
LIVE: Final = frozenset({"text/event-stream"})


class Another(Exception):
    """The response is not a repetition of the one that broke off."""


class HandedOut:
    """The part of a response that was returned: its status and encoding, and the size and digest of its body so far."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.size = 0
        self._is_live = (headers.get("Content-Type") or "").partition(";")[0].strip().lower() in LIVE
        self._head = _head(status, headers)
        self._digest = hashlib.sha256()

    @property
    def can_go_on(self) -> bool:
        """Return whether a retry is worthwhile."""
        return not self._is_live and self.size <= _retrying.ANSWER_MAX

    def add(self, part: bytes) -> bytes:
        """Note a part, and return it."""
        self.size += len(part)
        self._digest.update(part)
        return part

    def rest_of(self, status: int, headers: Mapping[str, str]) -> Rest:
        """Begin to read this response, or its repetition. Raise `Another` if it cannot be one."""
        if _head(status, headers) != self._head:
            raise Another
        return Rest(self.size, self._digest.digest())


class Rest:
    """Skips the part that was returned before. Raises `Another` if it differs."""

    def __init__(self, size: int, digest: bytes) -> None:
        self._left, self._digest = size, digest
        self._seen = hashlib.sha256()

    def of(self, part: bytes) -> bytes:
        """Return the new bytes of this part."""
        if not self._left:
            return part
        known, new = part[: self._left], part[self._left :]
        self._seen.update(known)
        self._left -= len(known)
        if not self._left and self._seen.digest() != self._digest:
            raise Another
        return new

    def check_end(self) -> None:
        if self._left:
            raise Another


def _head(status: int, headers: Mapping[str, str]) -> tuple[int, str]:
    return status, (headers.get("Content-Encoding") or "identity").strip().lower()
