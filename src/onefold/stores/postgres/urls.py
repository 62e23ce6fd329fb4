"""What a PostgreSQL URL says: where the database is, and how the store shall work there. Read without a driver.

Messages name the place without the password, and never quote a URL that could not be read.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from onefold._checks import did_you_mean, finite, one_of, positive, yes_or_no
from onefold.errors import UsageError
from onefold.stores.opening import check_password
from onefold.stores.sql.pool import PATIENCE, SIZE

DRIVERS: Final = ("asyncpg", "psycopg")

# As a URL says them.
ISOLATIONS: Final = ("read-committed", "repeatable-read", "serializable")

# A server that is absent and says nothing is not waited for longer. libpq counts in whole seconds.
CONNECT_SECONDS: Final = 10

# For people who look at pg_stat_activity.
APPLICATION: Final = "onefold"


class Settings(NamedTuple):
    """A database, and how to work there."""

    # For messages: without a password.
    name: str
    driver: str
    # For the driver: without our own options.
    url: str
    # Those of the driver, by their names.
    options: dict[str, str]
    auto_schema: bool = True
    isolation: str | None = None
    pool_size: int = SIZE
    pool_timeout: float = PATIENCE
    # None: where no pooler stands between.
    prepare: bool | None = None
    purge: bool = True


OPTIONS: Final = ("auto_schema", "isolation", "pool_size", "pool_timeout", "prepare", "purge")


def settings_of(url: str) -> Settings:
    """The place that this URL names."""
    check_password(url)
    parts = urlsplit(url)
    if parts.fragment:
        # It would be left out, silently.
        raise unreadable()
    scheme, _, driver = parts.scheme.partition("+")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ours: dict[str, str] = {name: options.pop(name) for name in OPTIONS if name in options}
    # libpq takes a plus for a plus.
    plain = parts._replace(scheme="postgresql", query=urlencode(options, quote_via=quote), fragment="")
    return Settings(
        name=f"{scheme}://{f'{user}@' if user else ''}{hosts}{parts.path}",
        driver=one_of(driver or "psycopg", DRIVERS, "driver"),
        url=plain.geturl(),
        options=options,
        **_checked(ours),
    )


def _checked(ours: dict[str, str]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name in ("auto_schema", "prepare", "purge"):
        if name in ours:
            checked[name] = yes_or_no(ours[name], name)
    if "isolation" in ours:
        checked["isolation"] = _isolation(ours["isolation"])
    if "pool_size" in ours:
        if not ours["pool_size"].isdecimal() or int(ours["pool_size"]) < 1:
            raise UsageError(f"pool_size={ours['pool_size']!r} has to be a whole number, 1 or more")
        checked["pool_size"] = int(ours["pool_size"])
    if "pool_timeout" in ours:
        checked["pool_timeout"] = finite(positive(ours["pool_timeout"], "pool_timeout"), "pool_timeout")
    return checked


def _isolation(written: str) -> str:
    """The level as SQL says it. Spaces and underscores are taken for hyphens."""
    level = written.lower().replace("_", "-").replace(" ", "-")
    if level not in ISOLATIONS:
        one_of(written, ISOLATIONS, "isolation")
    return level.replace("-", " ")


def check_options(settings: Settings, known: list[str]) -> None:
    """Refuse an option that neither we nor the driver knows: a mistyped one would do nothing, silently."""
    for name in settings.options:
        if name not in known:
            every = (*OPTIONS, *known)
            raise UsageError(f"{settings.name}: there is no option {name!r}{did_you_mean(name, every)}")


def unreadable() -> UsageError:
    return UsageError(
        "the PostgreSQL URL cannot be read. Write postgresql://user:password@host:5432/database, with %40 for @, "
        "%23 for #, %2F for /, %3A for :, %3F for ? and %25 for % inside of user and password"
    )
