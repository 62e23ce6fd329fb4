"""Read what happened to a held record from the options of a command. No store is opened here."""

from __future__ import annotations

import getpass
import json
from typing import Any

from onefold import Done, Failed, Rerun
from onefold.cli._common.output import WRONG_USAGE, Refusal, visible
from onefold.codecs import MsgspecCodec, Unstorable

Resolution = Done | Failed | Rerun


def resolution_of(
    *, is_done: bool, value: str | None, is_failed: bool, error: str | None, is_rerun: bool, reason: str
) -> Resolution:
    """Return the resolution that the options name. Raise `Refusal` before any store is opened."""
    if (is_done, is_failed, is_rerun).count(True) != 1:
        raise Refusal("say what happened: exactly one of --done, --failed and --rerun", WRONG_USAGE)
    if value is not None and not is_done:
        raise Refusal("--value is the result of --done, and has no meaning without it", WRONG_USAGE)
    if error is not None and not is_failed:
        raise Refusal("--error is the error of --failed, and has no meaning without it", WRONG_USAGE)
    said(reason, "say why: --reason TEXT is kept in the record")
    if is_done:
        return Done(None if value is None else _parsed(value))
    return Failed(reason if error is None else error) if is_failed else Rerun()


def _parsed(value: str) -> Any:
    """Parse the JSON to a value that reads back unchanged."""
    try:
        found = json.loads(value, parse_constant=_refuse_constant)
        MsgspecCodec().encode(found, Any)
    except Unstorable as error:
        raise Refusal(f"--value cannot be stored, and nothing was changed: {error}", WRONG_USAGE) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"--value is not JSON, and nothing was changed: {error}. A string needs its own quotes: '\"paid\"'",
            WRONG_USAGE,
        ) from error
    return found


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def json_type(value: object) -> str:
    """Return the type of a JSON value, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case dict():
            return "an object"
        case _:
            return "a list"


def said(text: str, otherwise: str) -> str:
    """Return the text, which must not be empty."""
    if not text.strip():
        raise Refusal(otherwise, WRONG_USAGE)
    return text


def login() -> str:
    """Return who is at the terminal."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError) as error:
        raise Refusal("this user has no login name: pass --by NAME", WRONG_USAGE) from error


def word(resolution: Resolution) -> str:
    """Return its name: done, failed or rerun."""
    return type(resolution).__name__.lower()


def meaning(resolution: Resolution) -> str:
    """Return what follows from it, for people."""
    match resolution:
        case Done(value=value):
            return f"every duplicate gets {visible(json.dumps(value))}"
        case Failed(error=error):
            return f"every duplicate gets the error {visible(str(error))!r}"
        case _:
            return "the next delivery will run"
