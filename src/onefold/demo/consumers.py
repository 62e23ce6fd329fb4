"""The consumer's handler, three times: without a guard, with the record in the wallet's own transaction, with a claim.

A handler is created by `make(wallet, desk)` and called with a message; it returns a remark about it, if any. The first
two differ by one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from onefold.demo.wallet import Message, Wallet

if TYPE_CHECKING:
    from onefold import Policy

Handler = Callable[[Message], str]

OPERATION: Final = "credit"

REPLAYED: Final = "finds its record: already done, no effect"


class Desk(NamedTuple):
    """The store of a guard's records, if not the wallet's file; the scope separates runs of the demo."""

    store: str
    scope: str


def unguarded(wallet: Wallet, _: Desk) -> Handler:
    def handle(message: Message) -> str:
        with wallet.transaction() as tx:
            wallet.credit(tx, message)
        return ""

    return handle


def transactional(wallet: Wallet, _: Desk) -> Handler:
    """Credit with the record and the effect as rows of one file: both commit or neither."""
    from onefold import Guard
    from onefold.stores.sqlite import SqliteStore

    guard = Guard(SqliteStore(wallet.path))

    def handle(message: Message) -> str:
        with wallet.transaction("the effect and its record") as tx:
            outcome = guard.within(tx).run(OPERATION, message.key, lambda: wallet.credit(tx, message))
        return REPLAYED if outcome.replayed else ""

    return handle


def claiming(wallet: Wallet, desk: Desk) -> Handler:
    """Credit with the record elsewhere: the wallet is a system downstream, and gets a key to deduplicate on."""
    from onefold import Guard, current

    guard = Guard(desk.store, policy=policy(desk.store), scope=desk.scope)

    def handle(message: Message) -> str:
        refused = False

        def effect() -> None:
            nonlocal refused
            with wallet.transaction("the effect and its downstream key") as tx:
                refused = not wallet.takes(tx, current().key_for("wallet"))
                if not refused:
                    wallet.credit(tx, message)

        outcome = guard.run(OPERATION, message.key, effect, payload=message)
        if outcome.replayed:
            return REPLAYED
        return "runs again; the wallet knows the downstream key: no effect" if refused else ""

    return handle


def policy(url: str) -> Policy:
    """Return a policy with a short lease, because somebody is watching. A duplicate waits until it is over."""
    from onefold import Policy
    from onefold.stores.kinds import kind_of

    return Policy(lease=max(2.0, kind_of(url).lease_min), wait="30s", keep="1h")
