"""URLs: whatever is wrong with one, the password that is in it is not shown."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from onefold import AsyncGuard, Guard, UsageError
from onefold.stores.kinds import schemes
from onefold.stores.opening import open_store

SCHEMES = ("postgresql", "mysql", "redis", "redis+sentinel", "redis+cluster", "valkey")

ESCAPES = "%40 for @, %23 for #, %2F for /, %3F for ?"

# Pieces of a password that a message must not hold, each with what ends a URL's password too early.
PASSWORDS = (
    *("sesame/oyster", "sesame?oyster", "sesame#oyster", "sesame@oyster", "sesame@oyster#pearl", "sesame@oyster/pearl"),
    *("sesame@oyster?pearl", "sesame#oyster@pearl", "oyster=@sesame", "12/sesame", "12?sesame", "12#sesame"),
    *("sesame[oyster", "sesame]oyster", "ses[oyster]ame", "sesame?a=oyster", "12?a=sesame", "sesame@oyster?a=pearl"),
)
SECRETS = ("sesame", "oyster", "pearl", "ses", "ame")


def refusal(what: Any, *arguments: Any) -> str:
    """What it says, and what stands behind it."""
    with pytest.raises(UsageError) as refused:
        what(*arguments)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return str(refused.value)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("password", PASSWORDS)
def test_a_password_that_ends_too_early_is_told_and_not_shown(scheme: str, password: str) -> None:
    url = f"{scheme}://shop:{password}@localhost:1/db"

    for guard in (Guard, AsyncGuard):
        said = refusal(guard, url)

        assert ESCAPES in said
        assert f"'{scheme}://shop:***@localhost:1/db'" in said
        assert not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize("name", ["postgres", "mysql", "redis"])
@pytest.mark.parametrize("password", PASSWORDS)
def test_whoever_opens_a_store_without_a_guard_is_told_the_same(name: str, password: str) -> None:
    module = import_module(f"onefold.stores.{name}")
    scheme = "postgresql" if name == "postgres" else name

    for opened in (module.open_store, module.open_async_store):
        said = refusal(opened, f"{scheme}://:{password}@localhost:1/0")

        assert ESCAPES in said
        assert not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize(
    "url",
    [
        "shop:sesame@localhost",
        "sqlite://shop:sesame@/shop.db",
        "mysql://shop:sesame@localhost:x/db",
        "postgresql:/shop:sesame@localhost/db",
        "postgresql:shop:sesame@localhost/db",
        "postgresql:///shop:sesame@localhost/db",
        "redis:///shop:sesame@localhost",
        "redis://sh/op:sesame@localhost",
        "dynamodb://shop:12?sesame@localhost",
        "redis+sentinel://localhost/shop?sentinel_password=x#sesame",
        "postgresql://localhost/shop?password=x#sesame",
        "redis://shop:sesame@[localhost/0",
        "mysql://shop:ses[ame]@localhost/db",
        "mysql://shop:sesame\N{ACCOUNT OF}@localhost/db",
    ],
)
def test_a_url_that_cannot_be_meant_shows_no_password(url: str) -> None:
    said = refusal(lambda: Guard(url).store)

    assert not any(secret in said for secret in SECRETS)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost:5432/shop?application_name=a@b",
        "postgresql://[::1]/shop?application_name=a@b",
        "postgresql://[::1]:5432/shop?application_name=a@b&sslmode=prefer",
        "postgresql://shop:p%40ss%23w%2Fo%3Frd@localhost/shop",
        "postgresql://shop:p%40ss@one:5432,two:5433/shop?application_name=a@b",
        "postgresql://sh%40op:a:b@localhost/shop",
        "postgresql:///shop?host=/run/postgresql",
        "mysql://shop:p%2Fss@localhost:3306/shop?unix_socket=/run/my@sql.sock",
        "redis://:p%40ss@localhost:6379/0?client_name=a@b",
        "redis://localhost:6379?client_name=a@b",
        "redis+unix:///run/me@home/redis.sock?client_name=a@b",
        "redis+sentinel://one:1,two:2/shop?sentinel_password=p@ss",
        "redis+cluster://[::1]:1,[::2]:2?client_name=a@b",
        "dynamodb://records?region=x&endpoint_url=http://127.0.0.1:8000",
        "sqlite:////var/me@home/C:/@/records.db",
        "sqlite:///shop%23%40%3F.db",
        "memory:",
    ],
)
def test_a_url_that_is_written_well_is_taken(url: str) -> None:
    Guard(url).close()


@pytest.mark.parametrize(
    "url",
    [
        "dynamodb://onefold_records?region=x&aws_secret_access_key=sesame",
        "dynamodb://onefold_records?aws_session_token=sesame&region=x",
        "dynamodb://onefold_records?Secret=sesame",
        "dynamodb://onefold_records?%73ecret=sesame",
        "dynamodb://onefold_records?secretkey=ses%2Fame&endpoint_url=http://localhost",
        "dynamodb://AKIA:sesame@onefold_records",
        "dynamodb://AKIA:sesame?region=x",
        "dynamodb://AKIA:sesame",
        "redis://localhost:6379,other:sesame/0",
        "redis://localhost:1/0?api_key=sesame",
        "postgresql://localhost:1/db?sslpassword=sesame",
    ],
)
def test_a_secret_in_any_place_of_a_url_is_not_shown(url: str) -> None:
    for guard in (Guard, AsyncGuard):
        try:
            shown = repr(guard(url))
        except UsageError as refused:
            shown = str(refused)

        assert "ame" not in shown
        assert "***" in shown or shown.startswith("the PostgreSQL URL")


def test_what_is_no_secret_is_shown() -> None:
    for url in ("dynamodb://records?region=eu-central-1", "redis://[::1]:6379/0?prefix=shop", "sqlite:///C:/a.db"):
        assert repr(Guard(url)) == f"Guard({url!r})"


def test_a_file_may_have_any_letter_in_its_name(tmp_path: Any) -> None:
    with Guard(f"sqlite:///{tmp_path}/a%23b%3Fc%25@d.db") as guard:
        guard.run("charge", "pay_1", lambda: 1)

    assert (tmp_path / "a#b?c%@d.db").exists()
    assert "%23 for #" in refusal(lambda: Guard(f"sqlite:///{tmp_path}/a#b.db").store)


def test_a_fragment_is_not_left_out_silently() -> None:
    assert "%23 for #" in refusal(lambda: Guard("postgresql://localhost/shop#1").store)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_an_isolation_is_listed_as_it_is_written(scheme: str) -> None:
    said = refusal(lambda: Guard(f"{scheme}://localhost/shop?isolation=foo").store)

    assert "isolation='foo' is not one of 'read-committed', 'repeatable-read', 'serializable'" in said


def test_an_isolation_that_is_nearly_right_is_shown_as_it_was_written() -> None:
    said = refusal(lambda: Guard("postgresql://localhost/shop?isolation=Read-Comitted").store)

    assert "isolation='Read-Comitted' is not one of" in said
    assert "did you mean 'read-committed'?" in said


def test_without_sqlalchemy_its_store_says_what_to_install() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import onefold.stores.sqlalchemy"

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    last = ran.stderr.splitlines()[-1]
    assert last.endswith("onefold.stores.sqlalchemy needs SQLAlchemy: pip install 'onefold[sqlalchemy]'")
    assert last.startswith("onefold.errors.UsageError")


@pytest.mark.parametrize("rest", ["data[1.db", "a]b", "[zz]", "h\u2100x", "table?endpoint_url=http://["])
@pytest.mark.parametrize("scheme", sorted(schemes()))
def test_what_no_parser_can_read_is_a_usage_error_of_every_store(scheme: str, rest: str) -> None:
    for is_async in (False, True):
        assert refusal(partial(open_store, is_async=is_async), f"{scheme}://{rest}")


def test_a_file_after_two_slashes_is_told_how_to_write_it() -> None:
    assert "write sqlite:///relative.db" in refusal(lambda: open_store("sqlite://data[1.db", is_async=False))


def test_an_endpoint_whose_port_is_none_is_refused() -> None:
    said = refusal(lambda: open_store("dynamodb://table?endpoint_url=http://localhost:x", is_async=False))

    assert "http://127.0.0.1:8000" in said
