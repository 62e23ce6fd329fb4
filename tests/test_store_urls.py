"""URLs: whatever is wrong with one, the password that is in it is not shown."""

from __future__ import annotations

import pytest

from onefold import Guard, UsageError

SCHEMES = ("postgresql", "mysql", "redis", "redis+sentinel", "redis+cluster", "valkey")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("letter", ["/", "?", "#"])
def test_a_password_that_ends_the_host_is_told_and_not_shown(scheme: str, letter: str) -> None:
    with pytest.raises(UsageError, match="written with %2F") as refused:
        Guard(f"{scheme}://shop:sesame{letter}x@localhost:1/db")

    assert "sesame" not in str(refused.value)
    assert "shop:***@localhost" in str(refused.value)


@pytest.mark.parametrize(
    "url", ["shop:sesame@localhost", "sqlite://shop:sesame@/shop.db", "mysql://shop:sesame@localhost:x/db"]
)
def test_a_url_that_cannot_be_meant_shows_no_password(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        _ = Guard(url).store

    assert "sesame" not in str(refused.value)


def test_an_at_sign_in_an_option_is_no_password() -> None:
    Guard("postgresql://localhost:5432/shop?application_name=a@b").close()
