"""Resolve where a command looks: the URL of a store, or a file with several; and keep their secrets out of messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import typer

from onefold.cli._common.output import ENVIRONMENT, WRONG_USAGE, Refusal

if TYPE_CHECKING:
    from onefold.config import Configuration

WhereArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="URL|FILE",
        envvar=ENVIRONMENT,
        show_default=False,
        help="The store's URL, or an onefold.yaml or .toml with stores.",
    ),
]

FILES: Final = (".yaml", ".yml", ".toml")

# "C:\..." is a path.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")

# After the scheme: a login, hosts with numeric ports, a path without an @, and options.
_HOST: Final = r"(?:\[[^\]]*\]|[^][:@/?#,]+)(?::[0-9]*)?"
_PLAIN: Final = re.compile(
    rf"(?:(?P<login>[^@/?#]*)@)?(?P<rest>(?:{_HOST}(?:,{_HOST})*)?(?:/[^@?#]*)?(?:[?#].*)?)", re.DOTALL
)

# A shorter part of a password occurs in many ordinary words.
PART_MIN: Final = 3


def named(where: str | None) -> str:
    """Return what the user has named, by the argument or the environment."""
    if not where:
        raise Refusal(f"which store? Pass its URL or a file (onefold.yaml, say), or set {ENVIRONMENT}", WRONG_USAGE)
    return where


def stores_in(where: str) -> Iterator[tuple[str, str]]:
    """Yield the stores to look at: a name, if a file gives one, and a URL."""
    if not _is_file(where):
        yield "", where
        return
    for name, store in _declared(where, to_run=True).stores.items():
        if store.url is not None:
            yield name, store.url


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


def stores_to_examine(where: str) -> Iterator[tuple[str, str | Unset]]:
    """Yield the stores to examine, including those whose URL has an unset variable: it does not hide the others."""
    if not _is_file(where):
        yield "", where
        return
    found = _declared(where, to_run=False)
    for name, store in found.stores.items():
        yield name, store.url if store.url is not None else Unset(found.unset_of(name))


def _is_file(where: str) -> bool:
    return os.path.exists(where) or (where.endswith(FILES) and not _URL.match(where))


def _declared(where: str, *, to_run: bool) -> Configuration:
    if os.path.isfile(where) and not where.lower().endswith(FILES):
        raise Refusal(
            f"{where} is not a configuration ({', '.join(FILES)}). If it is a store, write sqlite:///{where}",
            WRONG_USAGE,
        )
    from onefold.config import read

    found = read(where, to_run=to_run)
    if not found.stores:
        raise Refusal(f"{where} declares no store", WRONG_USAGE)
    return found


def display_url(url: str) -> str:
    """Return where a store is, for people: without a login, and without options, which may contain a secret."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        return url.partition(":")[0] + ":"
    slashes = "//" if "://" in url else ""
    after = _login(url)[1] if slashes else url.partition(":")[2]
    return f"{scheme}:{slashes}{re.split('[?#]', after)[0]}"


def without_secrets(text: str, url: str) -> str:
    """Return a server's or driver's message without the passwords of this URL, whoever has quoted it."""
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
    """Return the login of a URL, and what comes after it.

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
