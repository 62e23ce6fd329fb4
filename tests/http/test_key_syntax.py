"""The syntax of `Idempotency-Key`: a string of RFC 9651, byte by byte, without the vectors of the working group.

`test_exchange.py` runs those, too, where `ONEFOLD_CONFORMANCE` points at them.
"""

from __future__ import annotations

import pytest

from onefold.http._requests.keys import parsed
from onefold.http._shared.messages import Refused

BYTES = range(256)
# Section 3.3.3: visible ASCII and the blank; a quote and a backslash only behind a backslash.
PLAIN = [byte for byte in range(0x20, 0x7F) if byte not in b'"\\']
ESCAPED = list(b'"\\')


def is_refused(value: bytes) -> bool:
    try:
        parsed(value, strict=True)
    except Refused as refused:
        return refused.code == "key_malformed"
    return False


def test_a_string_holds_visible_ascii_and_blanks_and_no_other_byte() -> None:
    taken = [byte for byte in BYTES if not is_refused(b'"a%cb"' % byte)]

    assert taken == PLAIN
    assert [parsed(b'"a%cb"' % byte, strict=True) for byte in PLAIN] == [f"a{chr(byte)}b" for byte in PLAIN]


def test_a_backslash_escapes_a_quote_and_itself_and_nothing_else() -> None:
    taken = [byte for byte in BYTES if not is_refused(rb'"a\%cb"' % byte)]

    assert taken == sorted(ESCAPED)
    assert [parsed(rb'"a\%cb"' % byte, strict=True) for byte in ESCAPED] == [f"a{chr(byte)}b" for byte in ESCAPED]


@pytest.mark.parametrize(
    "value", [b'"', b'"key', b'key"', b'"key\\', b'"key\\"', b"'key'", b'"a" "b"', b'"a"b', b'"a",']
)
def test_a_string_begins_and_ends_with_a_quote_and_nothing_follows_it(value: bytes) -> None:
    assert is_refused(value)


@pytest.mark.parametrize("value", [b' "key"', b'"key" ', b'   "key"   '])
def test_blanks_around_it_belong_to_the_header_and_not_to_the_key(value: bytes) -> None:
    assert parsed(value, strict=True) == "key"


@pytest.mark.parametrize("value", [b'"key";v=2', b'"key"; v', b'"key";a="b";c=?0', b'"key";  a=1'])
def test_parameters_may_follow_and_are_no_part_of_the_key(value: bytes) -> None:
    assert parsed(value, strict=True) == "key"


@pytest.mark.parametrize("value", [b'"key";', b'"key";V=2', b'"key";=2', b'"key" ;v=2', b'"key";v='])
def test_parameters_that_are_malformed_are_refused_with_their_string(value: bytes) -> None:
    assert is_refused(value)


@pytest.mark.parametrize(
    "value",
    [
        b"17",
        b"-1",
        b"1.5",
        b"token",
        b"*",
        b"?1",
        b":aGVsbG8=:",
        b"@1659578233",
        b'%"f%c3%bc"',
        b'("a" "b")',
        b"()",
        b"",
    ],
)
def test_an_item_of_another_type_is_no_key(value: bytes) -> None:
    assert is_refused(value)


def test_a_key_without_quotes_holds_visible_ascii_but_no_quote_or_comma() -> None:
    def taken(value: bytes) -> bool:
        try:
            return parsed(value) == value.decode("ascii")
        except Refused:
            return False

    assert [byte for byte in BYTES if taken(b"a%cb" % byte)] == [
        byte for byte in range(0x21, 0x7F) if byte not in b'",'
    ]
