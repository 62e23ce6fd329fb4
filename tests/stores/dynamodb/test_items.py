"""Records as items, without a server: each field has its attribute, and one at its default has none."""

from __future__ import annotations

from typing import Any

import pytest

from onefold._model import Address, Entry, Record
from onefold.stores.dynamodb.clock import Now
from onefold.stores.dynamodb.items import OPTIONAL, item_of, record_of

NOW = Now(1_000.0, 1_000.0, 0.0)

# Of each type that a field may have, another value than any default.
OTHER: dict[type, Any] = {bool: True, int: 7, str: "text", bytes: b""}


def written(**fields: Any) -> Entry:
    return Entry(address=Address("acme", "charge", "pay_1"), token=b"t" * 16, lease=5.0, ttl=50.0, **fields)


def test_a_field_at_its_default_takes_no_room() -> None:
    item = item_of(written(), 1, NOW)

    assert not set(OPTIONAL) & set(item)
    assert record_of(item, NOW) == Record(
        address=Address("acme", "charge", "pay_1"),
        token=b"t" * 16,
        revision=1,
        state=written().state,
        attempt=1,
        lease_left=5.0,
        ttl_left=50.0,
        age=0.0,
    )


@pytest.mark.parametrize("name", OPTIONAL)
def test_every_other_field_comes_back_as_it_was_written(name: str) -> None:
    usual = OPTIONAL[name]
    value = OTHER[bytes if usual is None else type(usual)]

    found = record_of(item_of(written(**{name: value}), 1, NOW), NOW)

    assert getattr(found, name) == value
    assert type(getattr(found, name)) is type(value)
