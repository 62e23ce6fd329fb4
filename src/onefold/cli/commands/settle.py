"""`onefold resolve` and `forget`: change a record by hand. Both show what they would change, and ask."""

from __future__ import annotations

import getpass
import json
from typing import Annotated, Any, Final

import typer

from onefold import Guard, Policy, Record, State, UsageError, done, failed, rerun
from onefold.cli._common.find import find_one, wanted
from onefold.cli._common.output import (
    WRONG_USAGE,
    Format,
    FormatOption,
    OperationOption,
    Refusal,
    ScopeOption,
    StoreOption,
    about,
    agreed,
    check_terminal,
    opened,
    print_json,
    visible,
)
from onefold.cli._common.record_text import behind_dead_bypass, facts, name
from onefold.cli.commands.records import DigestOption, KeyArgument, print_record
from onefold.codecs import MsgspecCodec, Unstorable

Resolution = done | failed | rerun

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
ValueOption = Annotated[str | None, typer.Option(metavar="JSON", help="The result that duplicates get, for --done.")]
ErrorOption = Annotated[
    str | None,
    typer.Option(metavar="TEXT", show_default="the reason", help="The error text that duplicates get, for --failed."),
]
ReasonOption = Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Why. Kept in the record.")]
ByOption = Annotated[
    str | None, typer.Option(metavar="NAME", show_default="your login name", help="Who. Kept in the record.")
]

# The policy is not known here, and a record that a person has settled must not run again by itself.
KEEP: Final = "forever"


def resolve(
    key: KeyArgument = None,
    is_done: Annotated[bool, typer.Option("--done", help="The effect happened.")] = False,
    value: ValueOption = None,
    is_failed: Annotated[bool, typer.Option("--failed", help="It failed for good.")] = False,
    error: ErrorOption = None,
    is_rerun: Annotated[bool, typer.Option("--rerun", help="It did not happen: the next delivery may run.")] = False,
    reason: ReasonOption = "",
    by: ByOption = None,
    keep: Annotated[str, typer.Option(help="How long the record stays from now on: 30d, say.")] = KEEP,
    digest: DigestOption = None,
    operation: OperationOption = None,
    scope: ScopeOption = None,
    yes: YesOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Settle a record that is on hold: say what happened. Who and why is written into the record.

    Takes exactly one of --done, --failed and --rerun, and a --reason.

    A record whose worker died, and that no delivery has marked as held since, is settled in the same way. A manual
    resolution can be corrected in the same way, too. A bypass that died is refused: the outcome that it was meant to
    replace stands.
    """
    resolution = _resolution(
        is_done=is_done, value=value, is_failed=is_failed, error=error, is_rerun=is_rerun, reason=reason
    )
    which = wanted(key, digest, operation, scope)
    who = _login() if by is None else _said(by, "say who you are: --by NAME is kept in the record")
    _check_asking(yes)
    with opened(store, policy=Policy(keep=keep)) as guard:
        record = find_one(guard.store, which)
        _check_unsettled(record)
        _ask(guard, record, f"Resolve it as {_word(resolution)}, so that {_meaning(resolution)}?", yes=yes)
        after = _resolved(guard, record, resolution, by=who, reason=reason)
        if format is Format.JSON:
            records = {"before": facts(record), "after": None if after is None else facts(after)}
            print_json({"resolved": _word(resolution), "by": who, "reason": reason} | records)
        else:
            typer.echo(f"{name(record)}: resolved as {_word(resolution)}; {_meaning(resolution)}")


def forget(
    key: KeyArgument = None,
    digest: DigestOption = None,
    operation: OperationOption = None,
    scope: ScopeOption = None,
    yes: YesOption = False,
    store: StoreOption = None,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """Remove a record, so that the next delivery will run, whatever has happened before."""
    which = wanted(key, digest, operation, scope)
    _check_asking(yes)
    with opened(store) as guard:
        record = find_one(guard.store, which)
        _check_not_running(record)
        _ask(guard, record, "Forget it? The next delivery will run, whatever has happened before.", yes=yes)
        address = record.address
        if not guard.forget(address.operation, address.key, scope=address.scope or None):
            raise Refusal(f"{name(record)} has gone by itself meanwhile: the next delivery will run")
        if format is Format.JSON:
            print_json({"forgotten": True, "before": facts(record)})
        else:
            typer.echo(f"{name(record)}: forgotten; the next delivery will run")


def _resolution(
    *, is_done: bool, value: str | None, is_failed: bool, error: str | None, is_rerun: bool, reason: str
) -> Resolution:
    """Return what the options say. Raises `Refusal` before any store is opened."""
    if (is_done, is_failed, is_rerun).count(True) != 1:
        raise Refusal("say what became of it: exactly one of --done, --failed and --rerun", WRONG_USAGE)
    if value is not None and not is_done:
        raise Refusal("--value is the result of --done, and has no meaning without it", WRONG_USAGE)
    if error is not None and not is_failed:
        raise Refusal("--error is the error of --failed, and has no meaning without it", WRONG_USAGE)
    _said(reason, "say why: --reason TEXT is kept in the record")
    if is_done:
        return done(None if value is None else _parsed(value))
    return failed(reason if error is None else error) if is_failed else rerun()


def _parsed(value: str) -> Any:
    """Parse the JSON to a value that reads back unchanged."""
    try:
        found = json.loads(value, parse_constant=_refuse_constant)
        MsgspecCodec().encode(found, Any)
    except Unstorable as error:
        raise Refusal(f"--value cannot be stored, and nothing was changed: {error}", WRONG_USAGE) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"--value is not JSON, and nothing was changed: {error}. A text needs quotes of its own: '\"paid\"'",
            WRONG_USAGE,
        ) from error
    return found


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def _said(text: str, otherwise: str) -> str:
    if not text.strip():
        raise Refusal(otherwise, WRONG_USAGE)
    return text


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError) as error:
        raise Refusal("this user has no login name: pass --by NAME", WRONG_USAGE) from error


def _word(resolution: Resolution) -> str:
    return type(resolution).__name__.lower()


def _meaning(resolution: Resolution) -> str:
    match resolution:
        case done(value=value):
            return f"every duplicate gets {visible(json.dumps(value))}"
        case failed(error=error):
            return f"every duplicate gets the error {visible(str(error))!r}"
        case _:
            return "the next delivery will run"


def _check_asking(yes: bool) -> None:
    if not yes:
        check_terminal()


def _check_not_running(record: Record) -> None:
    if record.is_live:
        left = about(record.lease_left)
        raise Refusal(f"{name(record)} is running, and nothing was changed. Its lease ends in {left}, unless renewed")


def _check_unsettled(record: Record) -> None:
    _check_not_running(record)
    earlier = behind_dead_bypass(record)
    if earlier is not None:
        raise Refusal(
            f"{name(record)} is {earlier.state.value}, and a bypass of it died: there is nothing to resolve, and "
            "nothing was changed. Duplicates still get the earlier ending. Bypass it again in code to run it once more "
            "(with the same keys downstream), or `onefold forget` it for good"
        )
    if record.state is not State.HELD and not record.is_abandoned and not record.was_resolved:
        raise Refusal(f"{name(record)} is {record.state.value}, not held: there is nothing to resolve")


def _ask(guard: Guard, record: Record, question: str, *, yes: bool) -> None:
    """Show the record and ask about it. If it changed while somebody thought about it, do not touch it."""
    if yes:
        return
    print_record(record, err=True)
    if not agreed(question):
        raise Refusal("nothing was changed")
    # A claim has its own token; the revision changes with a slow owner's heartbeat, and means nothing here.
    now = _read(guard, record)
    if now is None or (now.token, now.state) != (record.token, record.state):
        raise Refusal(f"{name(record)} has changed meanwhile, and nothing was changed by you. Look at it again")


def _resolved(guard: Guard, record: Record, resolution: Resolution, *, by: str, reason: str) -> Record | None:
    """Resolve it; return the record afterwards."""
    address = record.address
    try:
        guard.resolve(address.operation, address.key, resolution, by=by, reason=reason, scope=address.scope or None)
    except UsageError as error:
        # The options are right: its state has changed since it was found.
        raise Refusal(str(error)) from error
    return _read(guard, record)


def _read(guard: Guard, record: Record) -> Record | None:
    address = record.address
    return guard.read(address.operation, address.key, scope=address.scope or None)
