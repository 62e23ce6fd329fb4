"""Allow deliberate second runs: one record for each, in the store of the consumer's guard.

A permission is written before its message is sent, and its address is made of the record's digest, who allows it and
why: whoever repeats a redrive that was interrupted finds the same permission, with the same name, and a guard runs a
message once under one name. Another reason is another permission.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from onefold import Record, State, UsageError
from onefold._model import TOKEN_BYTES
from onefold._model.remarks import as_part
from onefold.durations import seconds
from onefold.maintenance.pages import records
from onefold.queues._shared.bypasses import BYPASS_HEADER, permission
from onefold.queues.keys import KEY_HEADER
from onefold.redrive.letters import Letter, NotSent, text
from onefold.redrive.sending import Headers
from onefold.stores.base import Address, Browsable, Entry, Query, Store

# Longer than a message waits in most queues. One whose permission is gone is delivered as a duplicate.
KEEP: Final = seconds("90d", "keep")

# With the time, the name of a bypass has at most 200 characters.
BY_MAX: Final = 40
REASON_MAX: Final = 110

NO_DIGEST: Final = "it has no digest of a key, so no bypass can be allowed for it"
NOT_ITS_STORE: Final = (
    "--store has no record of its operation, {operation}, with its digest: name the store of its consumer; or, if it "
    "has not run yet, or its record is gone, send it without --bypass"
)


class Permissions:
    """The bypasses that one person allows for one reason."""

    def __init__(self, store: Store, by: str, reason: str) -> None:
        for option, said, limit in (("--by", by, BY_MAX), ("--reason", reason, REASON_MAX)):
            if not said.strip() or not said.isprintable() or len(said) > limit:
                raise UsageError(f"{option} takes 1 to {limit} printable characters: the record's history keeps it")
        self._store = store
        self._ticket = hashlib.sha256(json.dumps([by, reason]).encode()).hexdigest()[:32]
        self._by, self._reason = by, reason

    def allow(self, letter: Letter) -> dict[str, str]:
        """Allow the letter's record to run once more, and return the header that says so. Raises `NotSent`."""
        if not letter.digest:
            raise NotSent(NO_DIGEST)
        entry = Entry(
            address=permission(letter.digest, self._ticket),
            token=secrets.token_bytes(TOKEN_BYTES),
            state=State.DONE,
            lease=0.0,
            ttl=KEEP,
            remark=as_part(f"redrive by {self._by} at {moment()}: {self._reason}"),
        )
        found = self._store.claim(entry)
        if isinstance(found, Record) and found.is_expired:
            self._store.claim(entry, replacing=found)
        return {BYPASS_HEADER: self._ticket}


def in_its_store(allow: Headers, store: Store) -> Headers:
    """Return `allow` for letters whose record the store has.

    In another store their consumer would not find the permission, and would absorb the message.
    """
    found: dict[str, Digests] = {}

    def checked(letter: Letter) -> Mapping[str, str]:
        # A store that cannot be asked is believed.
        if letter.digest and isinstance(store, Browsable):
            known = found.setdefault(letter.operation, Digests(store, letter.operation))
            if not _is_named(letter, store) and letter.digest not in known:
                raise NotSent(NOT_ITS_STORE.format(operation=letter.operation))
        return allow(letter)

    return checked


def _is_named(letter: Letter, store: Store) -> bool:
    """Return whether the store has the record that a letter's header names: one read, where a digest may need many."""
    where = Address("", letter.operation, text(letter.headers.get(KEY_HEADER, "")))
    found = store.read(where) if where.digest == letter.digest else None
    return found is not None and not found.is_expired


class Digests:
    """The digests of an operation's records, which are read once, and as far as necessary: no store knows a digest."""

    def __init__(self, store: Browsable, operation: str) -> None:
        self._seen: set[str] = set()
        self._unseen: Iterator[str] = (one.address.digest for one in records(store, Query(operation=operation)))

    def __contains__(self, digest: str) -> bool:
        while digest not in self._seen:
            one = next(self._unseen, None)
            if one is None:
                return False
            self._seen.add(one)
        return True


def moment() -> str:
    """Return the current time as text, for the name of a bypass. No decision depends on it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
