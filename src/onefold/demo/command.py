"""The command `onefold demo`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from onefold import Guard, OnefoldError
from onefold.cli._common.output import (
    FAILED,
    WRONG_USAGE,
    Format,
    FormatOption,
    Refusal,
    counting,
    note,
    print_json,
)
from onefold.cli._common.store_option import store_named
from onefold.demo import show
from onefold.demo.consumers import OPERATION, Desk, policy
from onefold.demo.scenes import FAILURE_POINTS, HANDLERS, FailurePoint, Side, play
from onefold.demo.stage import Failure, Stage
from onefold.demo.wallet import MESSAGES
from onefold.stores.kinds import kind_of

EPILOG: Final = "Example: onefold demo --store sqlite:///onefold.db"

WITHOUT: Final = Side("without", f"{HANDLERS}:unguarded")
TRANSACTIONAL: Final = Side("with", f"{HANDLERS}:transactional")

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        show_default="the wallet's own file",
        help="Keep the records in this store instead (its URL, or its name in onefold.yaml): claim mode.",
    ),
]


def demo(store: StoreOption = None, format: FormatOption = Format.TABLE) -> None:  # noqa: A002 - the option's name
    """Demonstrate the double charge: money moves through a queue, without a guard and with one.

    At each of the five places where duplicates arise, real processes fail, and one message is delivered twice.

    Deliveries are calls of the handler. Effects are counted in the wallet's ledger, a SQLite file.

    Exits with 1 if a guarded effect happened twice or was lost, or if an unguarded one was not duplicated.
    """
    if store is None:
        perform(TRANSACTIONAL, "transactional", format)
    with _elsewhere(store_named(store)) as side:
        perform(side, "claim", format)


def perform(
    guarded: Side,
    mode: str,
    format: Format,  # noqa: A002 - the option's name
    *,
    without: Side = WITHOUT,
    points: Sequence[FailurePoint] = FAILURE_POINTS,
) -> NoReturn:
    """Play both sides, print, and exit."""
    began = time.monotonic()
    with (
        _ended_gently(),
        tempfile.TemporaryDirectory(prefix="onefold-demo-") as folder,
        counting("the double charge", f"of {2 * len(points)} scenes") as progress,
    ):
        try:
            report = play(Stage(Path(folder)), (without, guarded), progress, points)
        except Failure as failure:
            raise Refusal(f"{failure}. Nothing is shown", FAILED) from failure
    seconds = time.monotonic() - began
    if format is Format.JSON:
        print_json(show.facts(report, mode, seconds))
    else:
        (show.on_terminal if sys.stdout.isatty() else show.on_pipe)(report, mode, seconds)
    raise typer.Exit(0 if report.holds else FAILED)


@contextlib.contextmanager
def _elsewhere(url: str) -> Iterator[Side]:
    """Open the guarded side on this store, which is checked once before anything starts, and left as it was."""
    if kind_of(url).in_process:
        raise Refusal("a memory store lives inside one process, and the demo's processes have to share it", WRONG_USAGE)
    scope = f"onefold-demo-{os.getpid()}-{secrets.token_hex(4)}"
    with Guard(url, policy=policy(url), scope=scope) as guard:
        guard.read(OPERATION, MESSAGES[0].key)
        try:
            yield Side("with", f"{HANDLERS}:claiming", Desk(url, scope))
        finally:
            _forget_all(guard)


def _forget_all(guard: Guard) -> None:
    for message in MESSAGES:
        try:
            guard.forget(OPERATION, message.key)
        except OnefoldError as error:
            note(f"the record of {message.key} stays for an hour: {error}")


@contextlib.contextmanager
def _ended_gently() -> Iterator[None]:
    """End the demo on SIGTERM as on Ctrl-C, together with its processes and its folder."""

    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        raise typer.Exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Exception:
        # Whatever else fails once it was stopped follows from that.
        if stopped:
            raise typer.Exit(128 + stopped[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
