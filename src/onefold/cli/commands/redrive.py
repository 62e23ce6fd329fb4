"""`onefold redrive`: look at dead letters, and send them back to where they came from. It sends only if told to."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from typing import Annotated, Any, Final

import typer

from onefold.cli._common.durations import seconds_of
from onefold.cli._common.find import DIGEST
from onefold.cli._common.opening import opened
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    Listing,
    OperationOption,
    Refusal,
    about,
    block,
    note,
    print_json,
    visible,
)
from onefold.cli._common.progress import summed_up
from onefold.cli._common.resolution import login, said
from onefold.cli._common.store_option import StoreOption, the_store
from onefold.health.report import counted
from onefold.redrive.brokers import open_letters
from onefold.redrive.letters import BrokerLost, DeadLetters, Wanted, chosen, text
from onefold.redrive.permissions import Permissions, in_its_store
from onefold.redrive.sending import Headers, Sent, plainly, planned, sending

ENVIRONMENT: Final = "ONEFOLD_BROKER"

LIMIT: Final = 1_000

# How many of the letters that stay for one reason are named.
NAMED_MAX: Final = 5

COLUMNS: Final = ("position", "age", "operation", "digest", "to", "reason")

DeadOption = Annotated[
    str,
    typer.Option(
        "--dead-letters",
        metavar="NAME",
        show_default=False,
        help="A queue (RabbitMQ, SQS), a subject (NATS), a stream (Redis) or a topic (Kafka). Required.",
    ),
]
BrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="URL",
        show_default=False,
        help=f"The broker: amqp:, kafka:, nats:, redis: or sqs:. Without it: the variable {ENVIRONMENT}.",
    ),
]
MatchingOption = Annotated[
    str, typer.Option("--matching", metavar="TEXT", show_default=False, help="Only with this in their reason.")
]
DigestsOption = Annotated[
    list[str] | None,
    typer.Option("--digest", show_default=False, help="Only with this digest of their key. May be repeated."),
]
OlderOption = Annotated[
    str | None,
    typer.Option("--older-than", metavar="TIME", show_default=False, help="Only those buried longer ago, such as 2h."),
]
NewerOption = Annotated[
    str | None,
    typer.Option("--newer-than", metavar="TIME", show_default=False, help="Only those buried since then, such as 1d."),
]
ShowOption = Annotated[
    str | None,
    typer.Option("--show", metavar="POSITION", show_default=False, help="Print this one, with its headers."),
]
BodyOption = Annotated[bool, typer.Option("--body", help="For --show: print its body as well.")]
ToOption = Annotated[
    str | None,
    typer.Option("--back-to", metavar="NAME", show_default=False, help="Send them here, wherever they came from."),
]
BypassOption = Annotated[
    bool, typer.Option("--bypass", help="Run what is finished once more. Takes --reason, and the consumer's --store.")
]
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", show_default=False, help="Why it runs again. Kept in the record.")
]
ByOption = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", show_default="your login name", help="Who lets it run. Kept in the record."),
]
MostOption = Annotated[int, typer.Option("--limit", min=1, help="The maximum number of messages.")]


def redrive(
    dead_letters: DeadOption = "",
    broker: BrokerOption = None,
    send: Annotated[bool, typer.Option("--send", help="Send them back. Without it they are only listed.")] = False,
    matching: MatchingOption = "",
    operation: OperationOption = None,
    digest: DigestsOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    limit: MostOption = LIMIT,
    back_to: ToOption = None,
    bypass: BypassOption = False,
    reason: ReasonOption = "",
    by: ByOption = None,
    store: StoreOption = None,
    show: ShowOption = None,
    body: BodyOption = False,
    format: FormatOption = Format.TABLE,  # noqa: A002 - the option's name
) -> None:
    """List dead letters, and with --send, send each back to where it came from.

    Each is removed from the dead letters once the broker has confirmed it. If this command is interrupted, run it
    again: what was sent twice, or has run before, is absorbed by the guard of its consumer.

    With --bypass, what is finished runs once more: once for each --reason, however often it is delivered, or this
    command is repeated. The record's history says who let it run, when and why.

    Stops after the letters that were there when it began. Exits with 1 if one could not be sent, and stays.
    """
    ages = (_age(older_than, "--older-than"), _age(newer_than, "--newer-than"))
    wanted = Wanted(matching, operation, _digests(digest), *ages, limit)
    if not dead_letters:
        raise Refusal("which dead letters? Pass --dead-letters NAME, such as charges.dead", WRONG_USAGE)
    if back_to == "":
        raise Refusal("--back-to names no place: leave it out to send each to where it came from", WRONG_USAGE)
    if back_to == dead_letters:
        raise Refusal("--back-to names the dead letters themselves: a message would only lose its reason", WRONG_USAGE)
    url = _broker(broker)
    _check(send=send, show=show, body=body, bypass=bypass, reason=reason, by=by, store=store)
    with ExitStack() as stack:
        headers: Headers = plainly
        if bypass:
            guard = stack.enter_context(opened(the_store(store)))
            who = login() if by is None else by
            allow = Permissions(guard.store, who, said(reason, "say why: --reason TEXT is kept in the record")).allow
            headers = in_its_store(allow, guard.store)
            if not send and show is None:
                note(f"with --send, what is finished runs again, as allowed by {visible(who)}: {visible(reason)}")
        try:
            dead = stack.enter_context(closing(open_letters(url, dead_letters)))
            if show is not None:
                _show(dead, show, format, body=body)
            elif send:
                _send(dead, wanted, back_to, headers, format)
            else:
                _list([_light(planned(letter, back_to)) for letter in chosen(dead.letters(), wanted)], wanted, format)
        except BrokerLost as error:
            raise Refusal(str(error)) from None


def _broker(given: str | None) -> str:
    url = given or os.environ.get(ENVIRONMENT)
    if not url:
        raise Refusal(
            f"which broker? Pass --broker URL, such as amqp://localhost, or set the variable {ENVIRONMENT}", WRONG_USAGE
        )
    return url


def _check(
    *, send: bool, show: str | None, body: bool, bypass: bool, reason: str, by: str | None, store: str | None
) -> None:
    """Refuse options that have no meaning together, before anything is opened."""
    if show is not None and send:
        raise Refusal("--show prints one message, and --send sends: pass either", WRONG_USAGE)
    if body and show is None:
        raise Refusal("--body is for --show POSITION: bodies are not listed", WRONG_USAGE)
    if bypass:
        said(reason, "say why: --reason TEXT is kept in the record")
        if by is not None:
            said(by, "say who you are: --by NAME is kept in the record")
    elif reason or by is not None or store is not None:
        raise Refusal("--reason, --by and --store are for --bypass: nothing else is written to a store", WRONG_USAGE)


def _digests(given: list[str] | None) -> frozenset[str]:
    found = frozenset(one.lower() for one in given or ())
    for one in sorted(found):
        if not DIGEST.fullmatch(one):
            raise Refusal(f"--digest {visible(one)} is not a digest, which has twelve hexadecimal digits", WRONG_USAGE)
    return found


def _age(given: str | None, option: str) -> float | None:
    return None if given is None else seconds_of(given, option)


def _list(plans: list[Sent], wanted: Wanted, format_: Format) -> None:
    if format_ is Format.JSON:
        print_json(_document(plans, dry_run=True))
    else:
        _table(plans)
    stays = [plan for plan in plans if plan.problem]
    _tell_stays(stays)
    for warning in dict.fromkeys(plan.letter.warning for plan in plans if plan.letter.warning):
        note(f"careful: {warning}")
    if plans:
        note(f"{counted(len(plans) - len(stays), 'message')} would be sent back. Pass --send to do it")
    else:
        note("there are no dead letters that match")
    _tell_limit(plans, wanted)


def _send(dead: DeadLetters, wanted: Wanted, to: str | None, headers: Headers, format_: Format) -> None:
    done: list[Sent] = []
    try:
        with summed_up("sending back", "messages", lambda: _summary(done) if done else "") as tell:
            for one in sending(dead, chosen(dead.letters(), wanted), to, headers):
                done.append(_light(one))
                tell(len(done))
    except BrokerLost as error:
        how_far = f". Until then: {_summary(done)}. Run it again for the rest" if done else ""
        raise Refusal(f"{error}{how_far}") from None
    finally:
        if format_ is Format.JSON:
            print_json(_document(done, dry_run=False))
    stays = [one for one in done if one.problem]
    if format_ is Format.TABLE:
        typer.echo(_summary(done))
    _tell_stays(stays)
    _tell_limit(done, wanted)
    if stays:
        raise typer.Exit(FAILED)


def _light(one: Sent) -> Sent:
    """Return it without its body, which may be large: it is only counted and listed from now on."""
    return one._replace(letter=one.letter._replace(body=b"", native=None))


def _summary(done: list[Sent]) -> str:
    stays = sum(bool(one.problem) for one in done)
    left = f", {stays:,} left among the dead letters" if stays else ""
    return f"{len(done) - stays:,} sent back{left}"


def _tell_stays(stays: Iterable[Sent]) -> None:
    """Print one line for each reason why letters stay."""
    by_problem: dict[str, list[str]] = {}
    for one in stays:
        by_problem.setdefault(one.problem, []).append(one.letter.position)
    for problem, positions in by_problem.items():
        more = f" and {len(positions) - NAMED_MAX:,} more" if len(positions) > NAMED_MAX else ""
        verb = "stays" if len(positions) == 1 else "stay"
        note(f"{visible(', '.join(positions[:NAMED_MAX]))}{more} {verb}: {visible(problem)}")


def _tell_limit(found: list[Sent], wanted: Wanted) -> None:
    if len(found) >= wanted.limit:
        note(f"these are the first {wanted.limit:,}. There may be more: see --limit")


def _show(dead: DeadLetters, position: str, format_: Format, *, body: bool) -> None:
    letter = next((one for one in dead.letters() if one.position == position), None)
    if letter is None:
        raise Refusal(f"there is no dead letter at {visible(position)}")
    facts = _facts(planned(letter, None)) | {"headers": _readable(letter.headers), "bytes": len(letter.body)}
    if body:
        facts["body"] = _text_or_base64(letter.body)
    if format_ is Format.JSON:
        print_json(facts)
        return
    headers = {f"  {visible(name)}": visible(one) for name, one in facts.pop("headers").items()}
    lines = {name: visible(_cell(name, value)) for name, value in facts.items() if name != "body"} | headers
    if body:
        # Its lines are its own; what else a terminal would obey is not printed.
        lines["body"] = "\n".join(map(visible, facts["body"].split("\n")))
    for line in block(list(lines), list(lines.values())):
        typer.echo(line.plain)


def _table(plans: list[Sent]) -> None:
    rows = [[visible(_cell(name, _facts(plan)[name])) for name in COLUMNS] for plan in plans]
    Listing(COLUMNS).add(rows)


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    return about(value) if name == "age" and isinstance(value, float) else str(value)


def _facts(plan: Sent) -> dict[str, Any]:
    letter = plan.letter
    return {
        "position": letter.position,
        "age": letter.age,
        "operation": letter.operation,
        "digest": letter.digest,
        "to": plan.to,
        "reason": letter.reason,
        "problem": plan.problem or None,
    }


def _document(done: list[Sent], *, dry_run: bool) -> dict[str, Any]:
    stays = sum(bool(one.problem) for one in done)
    count = {"would_send" if dry_run else "sent": len(done) - stays}
    return {"dry_run": dry_run, **count, "left": stays, "messages": [_facts(one) for one in done]}


def _readable(headers: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): text(value) for name, value in headers.items()}


def _text_or_base64(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return f"base64: {base64.b64encode(body).decode()}"
