"""MySQL and MariaDB URLs: where the database is, and the options of the connection, parsed strictly."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from onefold._checks import finite, one_of, positive, yes_or_no
from onefold.errors import UsageError
from onefold.stores.opening import check_password, without_password
from onefold.stores.sql.pool import PATIENCE, SIZE
from onefold.stores.urls import options_of

if TYPE_CHECKING:
    import ssl

PORT: Final = 3306

# The names that MySQL's own clients use.
TLS_MODES: Final = ("disabled", "preferred", "required", "verify-ca", "verify-identity")

ISOLATIONS: Final = ("read-committed", "repeatable-read", "serializable")

OPTIONS: Final = (
    *("pool_size", "pool_timeout", "connect_timeout", "read_timeout", "auto_schema", "isolation", "unix_socket"),
    *("purge", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key"),
)

# An operation of the store is one short statement. It may wait for a row, for up to 50 s by default.
READ_TIMEOUT: Final = 60.0
CONNECT_TIMEOUT: Final = 10.0

# More connections than any server has.
POOL_SIZE_MAX: Final = 10_000

# A day: the drivers want a limit, and a longer wait would be pointless.
TIMEOUT_MAX: Final = 86_400.0


class Settings(NamedTuple):
    host: str
    port: int
    unix_socket: str | None
    user: str
    password: str
    database: str
    connect_timeout: float
    read_timeout: float
    pool_size: int
    pool_timeout: float
    auto_schema: bool
    isolation: str | None
    tls_mode: str
    # None: determined by the mode alone.
    tls: ssl.SSLContext | None
    # Whether the store purges expired records in the background.
    purge: bool = True

    @property
    def name(self) -> str:
        """Return the name for messages, without a password."""
        return f"mysql://{self.unix_socket or f'{self.host}:{self.port}'}/{self.database}"

    @property
    def isolation_statement(self) -> str | None:
        if self.isolation is None:
            return None
        return f"SET SESSION TRANSACTION ISOLATION LEVEL {self.isolation.upper().replace('-', ' ')}"

    def __repr__(self) -> str:
        return f"Settings({self.name!r})"


def settings_of(url: str, driver: str, *, certificates: bool = True) -> Settings:
    """Parse a URL into settings: `mysql://user:password@host:3306/database?pool_size=10`.

    Without `certificates` their files are not read.
    """
    check_password(url)
    parts = urlsplit(url)
    _check_driver(parts.scheme, driver)
    shown = without_password(url)
    try:
        port = parts.port or PORT
    except ValueError as error:
        raise UsageError(f"{shown!r}: {error}") from None
    database = unquote(parts.path[1:])
    if not database or "/" in database or parts.fragment:
        raise UsageError(f"{shown!r}: write mysql://user:password@host/database")
    found = options_of(parts.query, OPTIONS, shown)
    tls_mode = _tls_mode(found)
    isolation = found.get("isolation")
    return Settings(
        host=parts.hostname or "localhost",
        port=port,
        unix_socket=found.get("unix_socket"),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=database,
        connect_timeout=_duration(found, "connect_timeout", CONNECT_TIMEOUT),
        read_timeout=_duration(found, "read_timeout", READ_TIMEOUT),
        pool_size=_pool_size(found.get("pool_size", str(SIZE))),
        pool_timeout=_duration(found, "pool_timeout", PATIENCE),
        auto_schema=yes_or_no(found.get("auto_schema", "yes"), "auto_schema"),
        isolation=None if isolation is None else one_of(isolation, ISOLATIONS, "isolation"),
        tls_mode=tls_mode,
        tls=_tls(tls_mode, found) if certificates else None,
        purge=yes_or_no(found.get("purge", "yes"), "purge"),
    )


def _check_driver(scheme: str, driver: str) -> None:
    _, plus, named = scheme.partition("+")
    if plus and named != driver:
        guards = {"pymysql": "a Guard", "asyncmy": "an AsyncGuard"}
        raise UsageError(f"{scheme}://: {guards[driver]} uses {driver} here. Write mysql:// or mysql+{driver}://")


def _duration(options: dict[str, str], name: str, usual: float) -> float:
    text = options.get(name, usual)
    found = finite(positive(text, name), name)
    if found > TIMEOUT_MAX:
        raise UsageError(f"{name}={text!r} is more than a day")
    return found


def _pool_size(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= POOL_SIZE_MAX:
        raise UsageError(f"pool_size={text!r} has to be a whole number from 1 to {POOL_SIZE_MAX}")
    return int(text)


def _tls_mode(options: dict[str, Any]) -> str:
    ca, cert, key = (options.get(f"ssl_{name}") for name in ("ca", "cert", "key"))
    # Naming a certificate implies verification.
    usual = "verify-identity" if ca else "required" if cert else "preferred"
    mode: str = one_of(options.get("ssl_mode", usual), TLS_MODES, "ssl_mode")
    if mode in ("disabled", "preferred"):
        if ca or cert or key:
            raise UsageError(f"ssl_mode={mode!r} does not use ssl_ca, ssl_cert and ssl_key: leave them out")
    elif key and not cert:
        raise UsageError("ssl_key= is the key of ssl_cert=: give both")
    return mode


def _tls(mode: str, options: dict[str, Any]) -> ssl.SSLContext | None:
    """Return the context; None for `disabled` and `preferred`."""
    if mode in ("disabled", "preferred"):
        return None
    ca, cert, key = (options.get(f"ssl_{name}") for name in ("ca", "cert", "key"))
    try:
        return _context(mode, ca, cert, key)
    except OSError as error:
        raise UsageError(f"ssl_ca={ca!r}, ssl_cert={cert!r}, ssl_key={key!r}: {error}") from error


@cache
def unverified() -> ssl.SSLContext:
    """Return a context that encrypts against eavesdroppers, but not against a man in the middle."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(mode: str, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    import ssl

    if mode == "required" and cert is None:
        return unverified()
    context = ssl.create_default_context(cafile=ca)
    context.check_hostname = mode == "verify-identity"
    context.verify_mode = ssl.CERT_NONE if mode == "required" else ssl.CERT_REQUIRED
    # MySQL's self-generated certificates are not strict enough for Python 3.13.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context
