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
            assert "***" in shown
        except UsageError as refused:
            shown = str(refused)

        assert "sesame" not in shown
        assert "ses%2Fame" not in shown


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
    assert last.endswith("the driver SQLAlchemy is not installed: pip install 'onefold[sqlalchemy]'")
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


OPTIONS = {
    "memory:?limt=3": "memory:?limit=10000",
    "memory:?limit=0": "limit=0",
    "sqlite:///app.db?auto_shema=no": "did you mean 'auto_schema'?",
    "sqlite:///app.db?sync=ful": "did you mean 'full'?",
    "postgresql://localhost/app?poolsize=3": "did you mean 'pool_size'?",
    "postgresql://localhost/app?pool_size=none": "pool_size='none'",
    "postgresql://localhost/app?sslmod=require": "did you mean 'sslmode'?",
    "mysql://localhost/app?poolsize=3": "did you mean 'pool_size'?",
    "mysql://localhost/app?ssl_mode=verify": "ssl_mode='verify'",
    "redis://localhost?max_conections=3": "did you mean 'max_connections'?",
    "redis+clutser://localhost": "did you mean 'cluster'?",
    "redis://localhost?prefix=": "prefix=''",
    "dynamodb://records?regoin=eu": "did you mean 'region'?",
    "dynamodb://r": "table='r'",
    "django://default?auto_shema=no": "did you mean 'auto_schema'?",
}


@pytest.mark.parametrize("url", OPTIONS)
def test_a_wrong_option_is_refused_when_the_guard_is_made(url: str) -> None:
    for guard in (Guard, AsyncGuard):
        assert OPTIONS[url] in refusal(guard, url)
        assert OPTIONS[url] in refusal(partial(guard, "memory:", migrate_from=url))


def test_a_driver_of_the_other_kind_is_refused_when_the_guard_is_made() -> None:
    assert "asyncpg is for an AsyncGuard" in refusal(Guard, "postgresql+asyncpg://localhost/app")
    assert "did you mean 'sslmode'?" in refusal(AsyncGuard, "postgresql+asyncpg://localhost/app?sslmod=require")
    assert "a Guard uses pymysql" in refusal(Guard, "mysql+asyncmy://localhost/app")
    assert "an AsyncGuard cannot use" in refusal(AsyncGuard, "django://default")


def test_an_option_of_libpq_is_none_of_ours_to_refuse() -> None:
    psycopg = pytest.importorskip("psycopg")

    for option in psycopg.pq.Conninfo.get_defaults():
        Guard(f"postgresql://localhost/app?{option.keyword.decode()}=1")


def test_a_certificate_is_read_when_the_store_is_opened_and_not_before() -> None:
    url = "mysql://localhost/app?ssl_ca=/missing/ca.pem"

    with Guard(url) as guard, pytest.raises(UsageError, match=r"/missing/ca\.pem"):
        _ = guard.store


def test_no_driver_is_imported_to_check_a_url() -> None:
    drivers = ["psycopg", "asyncpg", "pymysql", "asyncmy", "redis", "valkey", "boto3", "botocore", "django"]
    urls = ["postgresql://h/d", "mysql://h/d", "redis://h", "dynamodb://records", "django://default", "sqlite:///a.db"]
    code = (
        f"import sys; from onefold import Guard; [Guard(u) for u in {urls}]; print({{*{drivers}}} & {{*sys.modules}})"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert said.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("onefold.db", "sqlite:///onefold.db"),
        ("data/onefold", "sqlite:///data/onefold"),
        ("/var/lib/app.db", "sqlite:////var/lib/app.db"),
    ],
)
def test_the_path_of_a_file_is_answered_with_its_url(written: str, meant: str) -> None:
    assert f"did you mean '{meant}'?" in refusal(Guard, written)


def test_an_unknown_scheme_is_answered_with_the_known_ones_and_their_variants() -> None:
    known = refusal(Guard, "oracle://localhost").partition("Known: ")[2].split(", ")

    assert {"memory:", "sqlite:", "postgresql:", "postgresql+asyncpg:", "mysql+asyncmy:", "valkeys:"} <= set(known)
    assert {"redis+cluster:", "redis+sentinel:", "redis+unix:"} <= set(known)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("postgresql://localhost/app", "psycopg", "postgres"),
        ("postgresql+asyncpg://localhost/app", "asyncpg", "asyncpg"),
        ("mysql://localhost/app", "pymysql", "mysql"),
        ("redis://localhost", "redis", "redis"),
        ("dynamodb://records?region=eu-central-1", "botocore", "dynamodb"),
        ("django://default", "django", "django"),
    ],
)
def test_a_missing_driver_is_told_in_the_same_words_for_each_store(url: str, package: str, extra: str) -> None:
    guard = "AsyncGuard" if "asyncpg" in url else "Guard"
    check = "import asyncio; asyncio.run(guard.check())" if guard == "AsyncGuard" else "guard.check()"
    code = f"import sys; sys.modules['{package}'] = None; import onefold; guard = onefold.{guard}('{url}'); {check}"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr

    last = said.strip().splitlines()[-1].lower()
    assert last.startswith("onefold.errors.usageerror: the driver ")
    assert last.endswith(f"is not installed: pip install 'onefold[{extra}]'")
