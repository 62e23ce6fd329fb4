"""Compute and compare fingerprints: digests of payloads. Pure.

    form and names (4)   digest of all of it (32)
    form and names (4)   each argument's name (3)   digest of all of it (16)   each argument's digest (2)

Two fingerprints with the same names are compared by the digest of all. If a release has renamed or added an argument,
or another function has made the record, the arguments that both know are compared, by 16 bits of each. More is not
kept: a longer digest of a low-entropy argument would reveal it. Each digest includes the address, so that equal
payloads of two keys do not look alike.
"""

from __future__ import annotations

import enum
from binascii import crc32
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from struct import Struct
from typing import Final, NamedTuple

from onefold._fingerprint.canonical import LEAVES, REFUSALS, encode, encode_each, encode_plain

# The first byte: the version of the form. Forms of earlier and later versions are not compared with it.
WHOLE: Final = b"\x02"
IN_PARTS: Final = b"\x03"

HEAD_SIZE: Final = 4
DIGEST_SIZE: Final = 16
NAME_SIZE: Final = 3
PART_SIZE: Final = 2

# A fingerprint stays below the 128 bytes that every store has for it. Further arguments are only in the digest of all.
PARTS_MAX: Final = 20


class Recipe(NamedTuple):
    """How a fingerprint is made: its prefix, and what puts prefix and digests together."""

    start: bytes
    # Takes the prefix, the digest of all, of which it keeps DIGEST_SIZE bytes, and the digests of the parts.
    pack: Callable[..., bytes] = Struct("").pack


class Compared(enum.Enum):
    """The result of comparing two fingerprints."""

    EQUAL = "equal"
    DIFFERENT = "different"
    # Equal as far as both know; but the record knows more, or they have nothing in common.
    UNKNOWN = "unknown"


EQUAL: Final = Compared.EQUAL


def recipe_of_whole(name: str) -> Recipe:
    """Return the recipe for a payload that comes as one value."""
    return Recipe(WHOLE + _digest(name)[: HEAD_SIZE - 1])


def recipe_of_parts(names: Sequence[str]) -> Recipe:
    """Return the recipe for named arguments."""
    kept = names[:PARTS_MAX]
    head = IN_PARTS + _digest("\0".join(names))[: HEAD_SIZE - 1]
    start = head + b"".join(_digest(name)[:NAME_SIZE] for name in kept)
    return Recipe(start, Struct(f">{len(start)}s{DIGEST_SIZE}s{len(kept)}H").pack)


def of_whole(recipe: Recipe, address: tuple[str, str, str], payload: object) -> bytes:
    """Return the fingerprint of a payload that comes as one value."""
    return recipe.start + sha256("\0".join(address).encode() + encode(payload)).digest()


def of_parts(recipe: Recipe, address: tuple[str, str, str], values: Sequence[object]) -> bytes:
    """Return the fingerprint of arguments, in the order of the recipe's names."""
    salt = "\0".join(address).encode()
    seed = crc32(salt)
    if len(values) == 1:
        # One argument besides the key is common, and most are leaves: without a list, and without `encode`.
        value = values[0]
        try:
            form = encode_plain(value) if type(value) in LEAVES else encode(value)
        except REFUSALS:
            form = encode(value)
        return recipe.pack(recipe.start, sha256(salt + form).digest(), crc32(form, seed) & 0xFFFF)
    forms = encode_each(values)
    parts = [crc32(form, seed) & 0xFFFF for form in forms[:PARTS_MAX]]
    return recipe.pack(recipe.start, sha256(salt + b"".join(forms)).digest(), *parts)


def compare(found: bytes | None, wanted: bytes | None) -> Compared:
    """Compare the fingerprint of a record with that of a delivery. A missing one was not wanted: equal."""
    if found is None or wanted is None or found == wanted:
        return Compared.EQUAL
    if found[:HEAD_SIZE] == wanted[:HEAD_SIZE]:
        return Compared.DIFFERENT
    if found[:1] != IN_PARTS or wanted[:1] != IN_PARTS:
        return Compared.UNKNOWN
    theirs, ours = dict(_parts(found)), dict(_parts(wanted))
    common = theirs.keys() & ours.keys()
    if any(theirs[name] != ours[name] for name in common):
        return Compared.DIFFERENT
    return Compared.EQUAL if common and common == theirs.keys() else Compared.UNKNOWN


def _parts(fingerprint: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the digests with the names of their arguments."""
    count = (len(fingerprint) - HEAD_SIZE - DIGEST_SIZE) // (NAME_SIZE + PART_SIZE)
    digests = len(fingerprint) - count * PART_SIZE
    for number in range(count):
        name, digest = HEAD_SIZE + number * NAME_SIZE, digests + number * PART_SIZE
        yield fingerprint[name : name + NAME_SIZE], fingerprint[digest : digest + PART_SIZE]


def _digest(name: str) -> bytes:
    return sha256(name.encode()).digest()
