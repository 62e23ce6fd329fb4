"""PostgreSQL URLs: where the database is, and the store's options. Parsed without a driver.

Messages name the database without the password, and never quote a URL that could not be parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from onefold._checks import did_you_mean, finite, one_of, positive, yes_or_no
from onefold.errors import UsageError
from onefold.stores.opening import check_password
from onefold.stores.postgres.partitions.periods import period
from onefold.stores.sql.pool import PATIENCE, SIZE

DRIVERS: Final = ("asyncpg", "psycopg")

# As written in a URL.
ISOLATIONS: Final = ("read-committed", "repeatable-read", "serializable")

# The longest wait for a server that does not answer. libpq counts in whole seconds.
CONNECT_SECONDS: Final = 10

# For people who look at pg_stat_activity.
APPLICATION: Final = "onefold"


class Settings(NamedTuple):
    """A database, and the options of the store."""

    # The name for messages, without a password.
    name: str
    driver: str
    # The URL for the driver, without our own options.
    url: str
    # The driver's own options, by name.
    options: dict[str, str]
    auto_schema: bool = True
    isolation: str | None = None
    pool_size: int = SIZE
    pool_timeout: float = PATIENCE
    # None: prepare unless a pooler is in between.
    prepare: bool | None = None
    purge: bool = True
    # Whether the ends of records are told to those who wait in other processes. Needs a direct connection.
    notify: bool = False
    # How long a partition is written to, if expired records are dropped with theirs; see `partitions.periods`.
    partitions: str | None = None


OPTIONS: Final = ("auto_schema", "isolation", "notify", "partitions", "pool_size", "pool_timeout", "prepare", "purge")

# The options of libpq, of PostgreSQL 18 and a few later ones. The installed one may know fewer, and is asked when a
# connection is opened.
LIBPQ_OPTIONS: Final = (
    *("application_name", "channel_binding", "client_encoding", "connect_timeout", "dbname"),
    *("fallback_application_name", "gssdelegation", "gssencmode", "gsslib", "host", "hostaddr", "keepalives"),
    *("keepalives_count", "keepalives_idle", "keepalives_interval", "krbsrvname", "load_balance_hosts"),
    *("max_protocol_version", "min_protocol_version", "oauth_ca_file", "oauth_client_id", "oauth_client_secret"),
    *("oauth_issuer", "oauth_scope", "options", "passfile", "password", "port", "replication", "require_auth"),
    *("requirepeer", "scram_client_key", "scram_server_key", "service", "servicefile", "ssl_max_protocol_version"),
    *("ssl_min_protocol_version", "sslcert", "sslcertmode", "sslcompression", "sslcrl", "sslcrldir", "sslkey"),
    *("sslkeylogfile", "sslmode", "sslnegotiation", "sslpassword", "sslrootcert", "sslsni", "target_session_attrs"),
    *("tcp_user_timeout", "user"),
)

# The options that asyncpg reads from a URL. It sends any other to the server as a setting.
ASYNCPG_OPTIONS: Final = (
    *("application_name", "database", "dbname", "gsslib", "host", "krbsrvname", "options", "passfile", "password"),
    *("port", "service", "ssl_max_protocol_version", "ssl_min_protocol_version", "sslcert", "sslcrl", "sslkey"),
    *("sslmode", "sslnegotiation", "sslpassword", "sslrootcert", "target_session_attrs", "user"),
)


def settings_of(url: str) -> Settings:
    """Parse a URL into settings."""
    check_password(url)
    parts = urlsplit(url)
    if parts.fragment:
        # It would be dropped silently.
        raise unreadable()
    scheme, _, driver = parts.scheme.partition("+")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ours: dict[str, str] = {name: options.pop(name) for name in OPTIONS if name in options}
    # libpq takes a plus for a plus, not for a space.
    plain = parts._replace(scheme="postgresql", query=urlencode(options, quote_via=quote), fragment="")
    return Settings(
        name=f"{scheme}://{f'{user}@' if user else ''}{hosts}{parts.path}",
        driver=one_of(driver or "psycopg", DRIVERS, "driver"),
        url=plain.geturl(),
        options=options,
        **_checked(ours),
    )


def one_by_one(url: str) -> list[str]:
    """Return a URL for each server that this one names, in the same order."""
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    return [parts._replace(netloc=f"{credentials}{at}{host}").geturl() for host in hosts.split(",")]


def _checked(ours: dict[str, str]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name in ("auto_schema", "notify", "prepare", "purge"):
        if name in ours:
            checked[name] = yes_or_no(ours[name], name)
    if "isolation" in ours:
        checked["isolation"] = _isolation(ours["isolation"])
    if "partitions" in ours:
        checked["partitions"] = period(ours["partitions"])
    if "pool_size" in ours:
        if not ours["pool_size"].isdecimal() or int(ours["pool_size"]) < 1:
            raise UsageError(f"pool_size={ours['pool_size']!r} has to be a whole number, 1 or more")
        checked["pool_size"] = int(ours["pool_size"])
    if "pool_timeout" in ours:
        checked["pool_timeout"] = finite(positive(ours["pool_timeout"], "pool_timeout"), "pool_timeout")
    return checked


def _isolation(written: str) -> str:
    """Return the level as SQL writes it. Spaces and underscores count as hyphens."""
    level = written.lower().replace("_", "-").replace(" ", "-")
    if level not in ISOLATIONS:
        one_of(written, ISOLATIONS, "isolation")
    return level.replace("-", " ")


def check_options(settings: Settings, known: Sequence[str]) -> None:
    """Refuse an option that neither we nor the driver knows: a mistyped one would be ignored silently."""
    for name in settings.options:
        if name not in known:
            every = (*OPTIONS, *known)
            raise UsageError(f"{settings.name}: there is no option {name!r}{did_you_mean(name, every)}")


def unreadable() -> UsageError:
    return UsageError(
        "the PostgreSQL URL cannot be read. Write postgresql://user:password@host:5432/database, with %40 for @, "
        "%23 for #, %2F for /, %3A for :, %3F for ? and %25 for % in the user and password"
    )
