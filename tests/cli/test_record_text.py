"""A record as text and as JSON: everything that a record holds can be seen."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from onefold import Record, State
from onefold.cli._common.record_text import facts, lines
from onefold.stores.base import Address

RECORD = Record(
    address=Address("acme", "charge", "pay_7f3a"),
    token=b"t" * 16,
    revision=1,
    state=State.RUNNING,
    attempt=1,
    lease_left=10.0,
    ttl_left=1_000.0,
    age=5.0,
)


def another(value: Any) -> Any:
    """Return another value of the same type; without a value, bytes."""
    match value:
        case Address():
            return Address("acme", "charge", "pay_8b21")
        case State():
            return State.HELD
        case bool():
            return not value
        case int() | float():
            return value + 3_600
        case str():
            return f"{value}x"
        case bytes() | None:
            return b"another"
        case _:
            raise AssertionError(f"how does another {value!r} look?")


@pytest.mark.parametrize("field", Record.__struct_fields__)
def test_every_field_of_a_record_is_shown(field: str) -> None:
    changed = replace(RECORD, **{field: another(getattr(RECORD, field))})

    assert facts(changed) != facts(RECORD)
    assert lines(changed) != lines(RECORD)
