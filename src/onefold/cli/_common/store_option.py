"""Find the stores that a command is about, the same way for every command; and mask their secrets in messages.

A store is named by its URL, by its name in the configuration of this folder, or by another configuration that declares
it: after `--store`, or in the environment variable. If neither names one, it is the one store of this folder's
configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import typer

from onefold._checks import did_you_mean
from onefold.cli._common.output import WRONG_USAGE, Refusal, visible

if TYPE_CHECKING:
    from onefold.config import Configuration

ENVIRONMENT: Final = "ONEFOLD_STORE"

FILES: Final = (".yaml", ".yml", ".toml")

# The configurations that are found without being named, in the current folder.
FOUND: Final = tuple(f"onefold{suffix}" for suffix in FILES)

_NAMING: Final = "The store: its URL, or its name in the onefold.yaml of this folder"
_OTHERWISE: Final = f"Without it: the variable {ENVIRONMENT}, or the one store of that file."

StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="STORE", show_default=False, help=f"{_NAMING}. {_OTHERWISE}"),
]
StoresOption = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        metavar="STORE",
        show_default=False,
        help=f"{_NAMING}; or a configuration, for every store in it. May be repeated. {_OTHERWISE}",
    ),
]

# "C:\..." is a path.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")

# After the scheme: a login, hosts with numeric ports, a path without an @, and options.
_HOST: Final = r"(?:\[[^\]]*\]|[^][:@/?#,]+)(?::[0-9]*)?"
_PLAIN: Final = re.compile(
    rf"(?:(?P<login>[^@/?#]*)@)?(?P<rest>(?:{_HOST}(?:,{_HOST})*)?(?:/[^@?#]*)?(?:[?#].*)?)", re.DOTALL
)

# A shorter part of a password occurs in many ordinary words.
PART_MIN: Final = 3


class Unset(NamedTuple):
    """Stands for the URL of a store with unset variables."""

    variables: list[str]

    @property
    def display_url(self) -> str:
        return " ".join(f"${{{name}}}" for name in self.variables)

    def __str__(self) -> str:
        several = len(self.variables) > 1
        names = ", ".join(self.variables)
        return f"the environment variable{'s' if several else ''} {names} {'are' if several else 'is'} not set"


class Target(NamedTuple):
    """A store to work on."""

    # Its name in a configuration; empty if its URL was given.
    name: str
    url: str | Unset

    @property
    def place(self) -> str:
        """The URL for people, without a login and without options."""
        return self.url.display_url if isinstance(self.url, Unset) else display_url(self.url)

    def url_to_open(self) -> str:
        """Return the URL. Raises `Refusal` if a variable in it is not set."""
        if isinstance(self.url, Unset):
            raise Refusal(f"{self.url}, so the store {visible(self.name)} is unknown", WRONG_USAGE)
        return self.url

    def without_secrets(self, text: str) -> str:
        """Return a message of the server or the driver without the passwords of the URL."""
        return text if isinstance(self.url, Unset) else without_secrets(text, self.url)


def the_store(given: str | None) -> str:
    """Return the URL of the one store that `--store`, the environment or this folder's configuration names."""
    return store_named(_given_or_found(None if given is None else [given])[0])


def store_named(named: str) -> str:
    """Return the URL of the one store with this name. Raises `Refusal` if a configuration is named that has several."""
    found = _targets(named)
    if len(found) > 1:
        names = ", ".join(visible(target.name) for target in found)
        how = "its name" if named in FOUND else "its URL"
        raise Refusal(f"{named} declares {names}. Say which one, by {how}", WRONG_USAGE)
    return found[0].url_to_open()


def the_stores(given: Sequence[str] | None) -> list[Target]:
    """Return the stores that the options, the environment or this folder's configuration name."""
    named = _given_or_found(given)
    found = [target for one in named for target in _targets(one)]
    if not (given or os.environ.get(ENVIRONMENT)) and len(found) > 1:
        names = ", ".join(visible(target.name) for target in found)
        raise Refusal(
            f"{named[0]} declares {names}. Say which with --store NAME, or --store {named[0]} for all", WRONG_USAGE
        )
    return found


def the_configurations(given: Sequence[str] | None) -> list[Configuration]:
    """Return the configurations among what `the_stores` takes: as a whole, not by the name of one of their stores."""
    from onefold.config import read

    return [read(one, to_run=False) for one in _given_or_found(given) if not _URL.match(one) and _is_file(one)]


def _is_file(named: str) -> bool:
    return named.lower().endswith(FILES)


def _given_or_found(given: Sequence[str] | None) -> Sequence[str]:
    """Return how the stores were named; at last, the configuration of this folder.

    An empty name is an unset variable of a script, which must not select another store.
    """
    if given and all(given):
        return given
    named = None if given else os.environ.get(ENVIRONMENT) or _file_here()
    if named is None:
        raise Refusal(
            "which store? Pass --store URL (--store sqlite:///onefold.db, say), or the name of a store in the "
            f"onefold.yaml of this folder, or set {ENVIRONMENT}",
            WRONG_USAGE,
        )
    return [named]


def _file_here() -> str | None:
    found = [name for name in FOUND if os.path.isfile(name)]
    if len(found) > 1:
        raise Refusal(
            f"this folder has {' and '.join(found)}: say which one, --store {found[0]} for instance", WRONG_USAGE
        )
    return found[0] if found else None


def _targets(named: str) -> list[Target]:
    if _URL.match(named):
        return [Target("", named)]
    if _is_file(named):
        return _declared(named)
    file = _file_here()
    declared = [] if file is None else _declared(file)
    found = [target for target in declared if target.name == named]
    if found:
        return found
    if os.path.isfile(named):
        raise Refusal(
            f"{named} is not a configuration ({', '.join(FILES)}). If it is a store, write sqlite:///{named}",
            WRONG_USAGE,
        )
    raise _unknown(named, file, declared)


def _unknown(named: str, file: str | None, declared: Sequence[Target]) -> Refusal:
    near = did_you_mean(named, [*(visible(target.name) for target in declared), "memory:"])
    where = "there is no onefold.yaml in this folder" if file is None else f"{file} declares no such store"
    return Refusal(
        f"{visible(named)!r} is not the URL of a store, as sqlite:///onefold.db is, and {where}{near}", WRONG_USAGE
    )


def _declared(file: str) -> list[Target]:
    """Return the stores of a configuration. An unset variable in one of their URLs does not hide the others."""
    from onefold.config import read

    found: Configuration = read(file, to_run=False)
    if not found.stores:
        raise Refusal(f"{file} declares no store", WRONG_USAGE)
    return [
        Target(name, store.url if store.url is not None else Unset(found.unset_of(name)))
        for name, store in found.stores.items()
    ]


def display_url(url: str) -> str:
    """Return the location of a store for people: without a login, and without options, which may contain a secret."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        return url.partition(":")[0] + ":"
    slashes = "//" if "://" in url else ""
    after = _login(url)[1] if slashes else url.partition(":")[2]
    return f"{scheme}:{slashes}{re.split('[?#]', after)[0]}"


def without_secrets(text: str, url: str) -> str:
    """Return a server's or driver's message without the passwords of this URL."""
    # The longest first: one may be a part of another.
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return text


def _secrets(url: str) -> set[str]:
    login, after = _login(url)
    written = login.partition(":")[2]
    # If it is not escaped, a driver takes a part of it for something else, and quotes that.
    parts = {part for part in re.split("[/?#@:]", written) if len(part) >= PART_MIN}
    options = parse_qsl(after.partition("?")[2])
    found = {written, unquote(written), *parts, *(value for name, value in options if "pass" in name.lower())}
    return {secret for secret in found if secret}


def _login(url: str) -> tuple[str, str]:
    """Return the login of a URL, and the rest after it.

    A password should be escaped but is not always: if the URL is not plain, its last @ ends the login.
    """
    after = url.partition("://")[2] or url
    if after.startswith("/"):
        return "", after
    plain = _PLAIN.fullmatch(after)
    if plain is not None:
        return plain["login"] or "", plain["rest"]
    login, _, rest = after.rpartition("@")
    return login, rest
