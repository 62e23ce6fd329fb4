"""Encode records as Redis strings, and operations as script calls. Pure: no client, no I/O, no clock.

A record is one string under one key, so that the server keeps it in the least memory and a cluster in one slot:

    token (16)  form (1)  began (6)  end of the lease (6, only while running)  counts (1 or 12)  fingerprint  contents

The form is the state (three bits), a bit for an omitted result, one for wide counts, and two for the fingerprint: of
the usual size, or with its length before it. The eighth bit is for a later form. Counts are the attempt, the revision
and the bypasses: small ones share a byte. Contents are notes, result and remark, or nothing at all. Of a finished
record without a result these are 60 bytes, the most that an allocation of 64 takes. Expiry is the server's own.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final, NamedTuple

from onefold._model import GONE, Address, Claim, Close, Ending, Entry, Gone, Record, Released, State
from onefold.errors import StoreUnavailable, UsageError

TOKEN_SIZE: Final = 16
USUAL_SIZE: Final = 36
SMALL_MAX: Final = 15

STATES: Final = (State.RUNNING, State.OPEN, State.DONE, State.FAILED, State.HELD)
NUMBERS: Final = {state: number for number, state in enumerate(STATES)}
OMITTED, WIDE, USUAL, UNUSUAL, LATER = 8, 16, 32, 64, 128

# Redis counts in milliseconds. A longer TTL is forever, so that no number can overflow.
YEARS_MAX: Final = 1_000
MILLISECONDS_MAX: Final = YEARS_MAX * 366 * 24 * 3600 * 1000
FOREVER: Final = b""

NOTHING: Final = bytes(4)
NOW_AND_LEFT: Final = struct.Struct(">dd")
# The two numbers above, and the shortest record.
RECORD_MIN: Final = 16 + 24

# A command in Redis's form: its name, and its arguments.
Command = tuple[bytes, ...]


def on_the_wire(command: Command) -> bytes:
    """Encode words as Redis reads them, one after the other."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in command])


def packed(commands: Sequence[Command]) -> bytes:
    return b"".join([b"*%d\r\n%b" % (len(command), on_the_wire(command)) for command in commands])


class Script(NamedTuple):
    """A script on the server: called by its hash, or with its text if the server does not have it (any more)."""

    by_hash: Command
    by_text: Command
    # The constant words of a call by hash.
    head: bytes


class ScriptCall(NamedTuple):
    """One call of a script, for one record."""

    script: Script
    key: bytes
    arguments: Command

    def by_hash(self) -> Command:
        return (*self.script.by_hash, self.key, *self.arguments)

    def by_text(self) -> Command:
        return (*self.script.by_text, self.key, *self.arguments)

    def packed(self) -> bytes:
        """Encode the call by hash, as it is sent on its own."""
        command = (self.key, *self.arguments)
        return b"*%d\r\n%b%b" % (3 + len(command), self.script.head, on_the_wire(command))


def _script(*names: str) -> Script:
    folder = files("onefold.stores.redis") / "lua"
    text = b"".join((folder / f"{name}.lua").read_bytes() for name in ("record", *names))
    # The hash is only Redis's name for a script; it protects nothing.
    named = (b"EVALSHA", hashlib.sha1(text, usedforsecurity=False).hexdigest().encode(), b"1")
    return Script(named, (b"EVAL", text, b"1"), on_the_wire(named))


CLAIM: Final = _script("claim")
EXTEND: Final = _script("parts", "extend")
FINISH: Final = _script("parts", "finish")
RELEASE: Final = _script("parts", "release")
READ: Final = _script("read")
ANNOTATE: Final = _script("parts", "annotate")


def claim(key: bytes, entry: Entry, replacing: Record | None = None) -> ScriptCall:
    if len(entry.token) != TOKEN_SIZE:
        raise UsageError(f"a token has {TOKEN_SIZE} bytes, but this one has {len(entry.token)}")
    form, lease = NUMBERS[entry.state], b""
    if entry.state is State.RUNNING:
        lease = _milliseconds(entry.lease)
    if entry.omitted:
        form |= OMITTED
    revision = entry.revision_after(replacing)
    if entry.attempt > SMALL_MAX or revision > SMALL_MAX or entry.bypasses:
        form |= WIDE
        rest = struct.pack(">III", entry.attempt, revision, entry.bypasses)
    else:
        rest = b"%c" % (entry.attempt << 4 | revision)
    if entry.fingerprint is not None:
        usual = len(entry.fingerprint) == USUAL_SIZE
        form |= USUAL if usual else UNUSUAL
        rest += entry.fingerprint if usual else struct.pack(">I", len(entry.fingerprint)) + entry.fingerprint
    rest += _contents(entry.notes, entry.result, entry.remark)
    seen = () if replacing is None else (replacing.token, b"%d" % replacing.revision)
    head = entry.token + b"%c" % form
    return ScriptCall(CLAIM, key, (head, _milliseconds(entry.age), lease, _ttl(entry.ttl), rest, *seen))


def claimed(address: Address, reply: Any) -> Record | Gone | None:
    """Return the result of a claim: None if it is written, else the existing record."""
    if reply == 1:
        return None
    return GONE if reply == 0 else record(address, reply)


def extend(key: bytes, claim: Claim, notes: bytes | None = None) -> ScriptCall:
    arguments = (claim.token, _milliseconds(claim.lease), _ttl(claim.ttl))
    return ScriptCall(EXTEND, key, arguments if notes is None else (*arguments, _field(notes)))


def finish(key: bytes, claim: Claim, ending: Ending) -> ScriptCall:
    contents = _contents(ending.notes, ending.result, ending.remark)
    omitted = b"%d" % (OMITTED if ending.omitted else 0)
    return ScriptCall(FINISH, key, (claim.token, _ttl(ending.ttl), b"%d" % NUMBERS[ending.state], omitted, contents))


def release(key: bytes, claim: Claim, released: Released | None = None) -> ScriptCall:
    if released is None:
        return ScriptCall(RELEASE, key, (claim.token,))
    left = (_ttl(released.ttl), b"%d" % released.attempt, _field(released.notes), released.remark.encode())
    return ScriptCall(RELEASE, key, (claim.token, *left))


def close(key: bytes, close: Close) -> ScriptCall:
    """Return the call that ends one claim of a batch."""
    if isinstance(close.by, Ending):
        return finish(key, close.claim, close.by)
    return release(key, close.claim, close.by)


def annotate(key: bytes, seen: Record, notes: bytes) -> ScriptCall:
    return ScriptCall(ANNOTATE, key, (seen.token, b"%d" % seen.revision, _field(notes)))


def read(key: bytes) -> ScriptCall:
    return ScriptCall(READ, key, ())


def read_reply(address: Address, reply: Any) -> Record | None:
    return None if reply is None else record(address, reply)


def as_stored(key: bytes, shown: bytes) -> dict[str, Any]:
    """Return what a script shows, in parts: the key, the string, its TTL and the time, which are milliseconds."""
    now, ttl_left = NOW_AND_LEFT.unpack_from(shown)
    return {"key": key, "value": shown[NOW_AND_LEFT.size :], "pttl": int(ttl_left), "now": int(now)}


def record(address: Address, shown: bytes) -> Record:
    """Decode a record as a script shows it: the time of reading, the remaining TTL, and the string itself."""
    now, ttl_left = NOW_AND_LEFT.unpack_from(shown)
    form = shown[32] if len(shown) >= RECORD_MIN else LATER
    if form & LATER or form % 8 >= len(STATES):
        raise StoreUnavailable(
            f"{address.operation} [key {address.digest}]: what is stored was not written by this version of Onefold. "
            "Upgrade it; or, if another program writes there, choose another prefix"
        )
    state, lease_left, at = STATES[form % 8], 0.0, 39
    if state is State.RUNNING:
        lease_left, at = (int.from_bytes(shown[39:45]) - now) / 1000, 45
    if form & WIDE:
        attempt, revision, bypasses = struct.unpack_from(">III", shown, at)
        at += 12
    else:
        attempt, revision, bypasses, at = shown[at] >> 4, shown[at] % 16, 0, at + 1
    fingerprint = None
    if form & (USUAL | UNUSUAL):
        size = USUAL_SIZE
        if form & UNUSUAL:
            size, at = int.from_bytes(shown[at : at + 4]), at + 4
        fingerprint, at = shown[at : at + size], at + size
    notes, result, remark = _read_contents(shown, at)
    return Record(
        address=address,
        token=shown[16:32],
        revision=revision,
        state=state,
        attempt=attempt,
        lease_left=lease_left,
        ttl_left=math.inf if ttl_left < 0 else ttl_left / 1000,
        age=(now - int.from_bytes(shown[33:39])) / 1000,
        bypasses=bypasses,
        fingerprint=fingerprint,
        notes=notes,
        result=result,
        omitted=bool(form & OMITTED),
        remark=remark,
    )


def _contents(notes: bytes | None, result: bytes | None, remark: str) -> bytes:
    if notes is None and result is None and not remark:
        return b""
    return _field(notes) + _field(result) + remark.encode()


def _field(value: bytes | None) -> bytes:
    return NOTHING if value is None else struct.pack(">I", len(value) + 1) + value


def _read_contents(shown: bytes, at: int) -> tuple[bytes | None, bytes | None, str]:
    if at == len(shown):
        return None, None, ""
    notes, at = _read_field(shown, at)
    result, at = _read_field(shown, at)
    return notes, result, shown[at:].decode()


def _read_field(shown: bytes, at: int) -> tuple[bytes | None, int]:
    size = int.from_bytes(shown[at : at + 4])
    ends = at + 3 + size if size else at + 4
    return (shown[at + 4 : ends] if size else None), ends


def _milliseconds(duration: float) -> bytes:
    # Rounded up: a lease is never shorter than promised.
    exact = duration * 1000
    return b"%d" % (math.ceil(exact) if 0 < exact < MILLISECONDS_MAX else exact > 0 and MILLISECONDS_MAX)


def _ttl(ttl: float) -> bytes:
    # The shortest TTL is a millisecond; with zero the record would not exist.
    exact = ttl * 1000
    return FOREVER if exact > MILLISECONDS_MAX else b"%d" % (math.ceil(exact) if exact > 1 else 1)
