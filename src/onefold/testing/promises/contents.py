"""Contents are kept: addresses stay apart, bytes stay bytes, and no field is lost."""

from __future__ import annotations

import itertools
import math
import os
import unicodedata
from typing import Final

import msgspec

from onefold.keys import KEY_MAX, OPERATION_MAX, SCOPE_MAX
from onefold.stores.base import Address, Entry, Record, State
from onefold.testing.promises._case import Case, claim_of, every

EVERY_BYTE = bytes(range(256))

# Larger than a page, a packet or a line of most databases, and below the limits of all.
LARGE = EVERY_BYTE * 400

# The size for a payload that comes as one value, and the largest for named arguments.
FINGERPRINT_SIZES = (36, 128)

# The fields that a claim writes and a record has under the same name. The age is not the same when it is read.
SAME: Final = tuple(name for name in Entry.__struct_fields__ if name in Record.__struct_fields__ and name != "age")

# Texts that some comparison considers equal: collations, trimming, truncation, wildcards, numbers, unicode forms.
CONFUSABLE = (
    *("key", "Key", "KEY", "key ", " key", "key\t", "key\n", "k ey", "kéy", "keý", "ke", "keyy"),
    *(unicodedata.normalize(form, "Ångström \ufb01") for form in ("NFC", "NFD", "NFKC")),
    *("straße", "strasse", "\u0131", "i", "I", "\u0130", "\u03c3", "\u03c2", "\uff41", "a"),
    *("1", "01", "1.0", "1e0", "+1", "true", "null", "None", "nan"),
    *("%", "_", "*", "?", "k%y", "k_y", "[k]ey", "\\", "\\\\", "'", "''", '"', "`", "--", ";", "$1", "%s", "{key}"),
    *("👍", "👍🏽", "👩‍👩‍👧", "👩👩👧", "🏳️‍🌈", "\u200b", "\u00ad", "\x01", "\x7f", "\uffff", "\U0010ffff"),
)


class Addresses(Case):
    """Bytes are compared: nothing is folded, trimmed, joined or cut."""

    def test_keys_that_look_alike_stay_apart(self) -> None:
        assert len(set(CONFUSABLE)) == len(CONFUSABLE)

        self._stay_apart([Address("scope", "operation", text) for text in CONFUSABLE])

    def test_operations_that_look_alike_stay_apart(self) -> None:
        self._stay_apart([Address("scope", text, "key") for text in CONFUSABLE])

    def test_scopes_that_look_alike_stay_apart(self) -> None:
        self._stay_apart([Address(text, "operation", "key") for text in ("", *CONFUSABLE)])

    def test_separators_do_not_join_the_parts_of_an_address(self) -> None:
        separators = (":", "/", "|", "#", ",", ".", "-", " ", "\x1f", "\n", "::")
        shifted = [
            Address(*parts)
            for mark in separators
            for parts in ((f"a{mark}b", "c", "d"), ("a", f"b{mark}c", "d"), ("a", "b", f"c{mark}d"))
        ]

        self._stay_apart([*shifted, Address("", "ab", "cd"), Address("", "a", "bcd"), Address("ab", "c", "d")])

    def test_addresses_of_the_greatest_length_stay_apart(self) -> None:
        scope, operation, key = "s" * SCOPE_MAX, "o" * OPERATION_MAX, "k" * KEY_MAX

        self._stay_apart(
            [
                Address(scope, operation, key),
                Address(scope, operation, key[:-1] + "K"),
                Address(scope, operation[:-1] + "O", key),
                Address(scope[:-1] + "S", operation, key),
                Address(scope, operation, key[:-1]),
                Address(scope[:-1], operation, key),
                # Four bytes a character: the limits count bytes.
                Address("🧾" * (SCOPE_MAX // 4), "🧾" * (OPERATION_MAX // 4), "🧾" * (KEY_MAX // 4)),
            ]
        )

    def test_what_is_done_to_one_address_is_not_done_to_its_likes(self) -> None:
        extended, finished, released, left = (self.claimed(key) for key in ("key", "Key", "key ", "kéy"))
        before = self.found(left)

        assert self.store.extend(claim_of(extended), b"notes") is True
        assert self.store.finish(claim_of(finished), self.ending()) is True
        assert self.store.release(claim_of(released)) is True

        self.untouched(before)
        assert self.found(extended).notes == b"notes"
        assert self.found(finished).result == b"result"
        self.absent(released.address)

    def _stay_apart(self, addresses: list[Address]) -> None:
        entries = [
            self.entry(address=address, state=State.DONE, result=address.packed, ttl=self.long) for address in addresses
        ]
        for entry in entries:
            self.written(self.store.claim(entry))
        for entry in entries:
            record = self.found(entry)
            assert (record.token, record.result) == (entry.token, entry.result)


class Fields(Case):
    """Every field of an entry, an ending and a release comes back unchanged."""

    def test_every_field_of_a_claim_comes_back(self) -> None:
        for (state, key), size in itertools.product(every(State), FINGERPRINT_SIZES):
            entry = self.entry(
                f"{key}-{size}",
                token=bytes(8) + b"\xff" * 8,
                state=state,
                attempt=70_000,
                age=self.long,
                bypasses=70_000,
                fingerprint=os.urandom(size),
                notes=EVERY_BYTE,
                result=EVERY_BYTE,
                omitted=True,
                remark="zurückgestellt: 👩‍👩‍👧 'quoted', \"twice\"\n%s \\ \x01",
            )
            assert _left_out(entry) <= {"state"}, "a field at its default proves nothing about a store"
            self._comes_back(entry)

    def test_a_claim_without_the_optional_fields_comes_back_without_them(self) -> None:
        self._comes_back(self.entry(attempt=0))

    def test_results_come_back_byte_for_byte(self) -> None:
        results = (EVERY_BYTE, b"", b"\0", b"null", None, LARGE)
        for number, result in enumerate(results):
            claimed = self.claimed(f"claimed-{number}", state=State.DONE, result=result)
            finished = self.claimed(f"finished-{number}")
            assert self.store.finish(claim_of(finished), self.ending(result=result)) is True

            assert self.found(claimed).result == result
            assert self.found(finished).result == result

    def test_notes_come_back_byte_for_byte(self) -> None:
        for number, notes in enumerate((EVERY_BYTE, b"", b"\0", LARGE)):
            claimed = self.claimed(f"claimed-{number}", notes=notes)
            extended, finished, released = (self.claimed(f"{number}-{way}") for way in range(3))
            assert self.store.extend(claim_of(extended), notes) is True
            assert self.store.finish(claim_of(finished), self.ending(notes=notes)) is True
            assert self.store.release(claim_of(released), self.released(notes=notes)) is True

            for entry in (claimed, extended, finished, released):
                assert self.found(entry).notes == notes

    def _comes_back(self, entry: Entry) -> None:
        self.written(self.store.claim(entry))
        record = self.found(entry)
        assert type(record.token) is bytes
        for field in SAME:
            assert getattr(record, field) == getattr(entry, field), field
        assert record.state is entry.state
        assert record.omitted is entry.omitted
        assert self.about(record.age, entry.age)
        assert self.about(record.lease_left, entry.lease) or entry.state is not State.RUNNING
        assert math.isclose(record.ttl_left, entry.ttl, abs_tol=self.long / 4)


def _left_out(entry: Entry) -> set[str]:
    """Return the names of the fields that have their default value."""
    return {field.name for field in msgspec.structs.fields(Entry) if getattr(entry, field.name) == field.default}
