"""Where the limits of a message's key are: what is at one is taken, and what is beyond it is told in words."""

from __future__ import annotations

import pytest

from onefold import MissingKey
from onefold.keys import KEY_MAX
from onefold.queues.keys import BODY_MAX, Message, field, usable


@pytest.mark.parametrize("key", ["k" * KEY_MAX, 10**KEY_MAX - 1])
def test_a_key_of_as_many_characters_as_there_may_be_is_taken(key: str | int) -> None:
    assert usable(key) == str(key)


@pytest.mark.parametrize("key", ["k" * (KEY_MAX + 1), 10**KEY_MAX, -(10**KEY_MAX)])
def test_one_more_is_refused_with_the_limit(key: str | int) -> None:
    with pytest.raises(MissingKey, match=f"the limit is {KEY_MAX}"):
        usable(key)


def test_a_body_is_searched_up_to_its_limit() -> None:
    found = b'{"id": "pay-1"}'.ljust(BODY_MAX)

    assert field("id")(Message(found, {}, None, "0")) == "pay-1"
    with pytest.raises(MissingKey, match=f"more than {BODY_MAX} bytes"):
        field("id")(Message(found + b" ", {}, None, "0"))
