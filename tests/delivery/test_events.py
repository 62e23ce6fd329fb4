"""Events tell each story, listeners break nothing, secrets stay secret, and errors travel with what they know."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sqlite3
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

from onefold import (
    AsyncGuard,
    ClaimLost,
    Done,
    Event,
    Guard,
    Held,
    InProgress,
    KeyReused,
    MissingKey,
    OnefoldError,
    Policy,
    RememberedFailure,
    Rerun,
    ResultUnreadable,
    Unknown,
    current,
    subscribe,
)
from onefold.errors import MEANINGS
from onefold.events import Kind, tell
from onefold.keys import address
from onefold.stores.memory import MemoryStore
from tests.support import PATIENCE, Clock, Elsewhere, Handler, Heard, ProxyStore, die_running, elsewhere

SECRET = "sk_live_4242"

HOLD = Policy(after_crash="hold")
SKIP = Policy(after_crash="skip")
PROBE = Policy(after_crash=lambda _current: Done("receipt"))
DOUBT = Policy(after_crash=lambda _current: Unknown())
FINAL = Policy(final_errors=(ValueError,))
UNGUARDED = Policy(store_down="run")


class Stage:
    """A store moved by hand, and everything that was told or raised on it."""

    def __init__(self, stall: Callable[[float], None]) -> None:
        self.clock, self.heard, self.stall = Clock(), Heard(), stall
        self.memory = MemoryStore(clock=self.clock)
        self.proxy = ProxyStore(self.memory)
        self.errors: list[BaseException] = []

    def guard(self, policy: Policy | None = None) -> Guard:
        return Guard(self.proxy, policy=policy, on_event=self.heard)

    def run(self, call: Callable[[], Any] = lambda: "ok", policy: Policy | None = None, **options: Any) -> Self:
        """Deliver the secret key once; what it raises is kept."""
        try:
            self.guard(policy).run("charge", SECRET, call, **options)
        except BaseException as error:
            self.errors.append(error)
        return self

    def running(self, policy: Policy | None = None) -> Self:
        die_running(self.memory, "charge", SECRET, policy)
        return self

    def abandoned(self, policy: Policy | None = None) -> Self:
        self.running(policy).clock.advance(31)
        return self

    def held(self) -> Self:
        return self.run(Handler(error=TimeoutError()), HOLD)

    def down(self) -> Self:
        self.proxy.die()
        return self


def zombie(stage: Stage) -> Callable[[], None]:
    def handler() -> None:
        stage.clock.advance(31)
        elsewhere(lambda: Guard(stage.memory).run("charge", SECRET, lambda: "theirs"))

    return handler


def unanswered(stage: Stage, error: Exception | None = None) -> Callable[[], str]:
    def handler() -> str:
        stage.proxy.die()
        # Finishing is tried again as long as the lease lasts.
        stage.proxy.before["finish"] = lambda: stage.stall(31)
        if error is not None:
            raise error
        return "paid"

    return handler


def waited(stage: Stage) -> None:
    def slow() -> str:
        waiting.append(Elsewhere(lambda: stage.run(policy=Policy(wait=PATIENCE))))
        stage.proxy.wait_for("claim", 2)
        return "ok"

    waiting: list[Elsewhere[Any]] = []
    Guard(stage.memory).run("charge", SECRET, slow)
    waiting[0].result()


def failing(error: BaseException) -> Handler:
    return Handler(error=error)


STORIES: dict[str, tuple[Callable[[Stage], Any], list[str]]] = {
    "it runs": (lambda stage: stage.run(), ["started", "finished"]),
    "it is replayed": (lambda stage: stage.run().run(), ["started", "finished", "replayed"]),
    "it fails": (lambda stage: stage.run(failing(ValueError())), ["started", "released"]),
    "it fails for good": (
        lambda stage: stage.run(failing(ValueError()), FINAL).run(policy=FINAL),
        ["started", "failed", "replayed"],
    ),
    "it is running": (lambda stage: stage.running().run(), ["refused"]),
    "it was running, and a duplicate waits": (waited, ["waited", "replayed"]),
    "it was abandoned": (lambda stage: stage.abandoned().run(), ["taken_over", "started", "finished"]),
    "it was abandoned, hold": (
        lambda stage: stage.abandoned(HOLD).run(policy=HOLD).run(policy=HOLD),
        ["held", "refused"],
    ),
    "it was abandoned, skip": (lambda stage: stage.abandoned(SKIP).run(policy=SKIP), ["skipped"]),
    "it was abandoned, a probe": (lambda stage: stage.abandoned(PROBE).run(policy=PROBE), ["probed", "finished"]),
    "it was abandoned, a doubt": (lambda stage: stage.abandoned(DOUBT).run(policy=DOUBT), ["probed", "held"]),
    "nobody knows": (lambda stage: stage.held(), ["started", "held"]),
    "it was interrupted": (lambda stage: stage.run(failing(KeyboardInterrupt())), ["started", "released"]),
    "it was interrupted, hold": (lambda stage: stage.run(failing(KeyboardInterrupt()), HOLD), ["started", "left"]),
    "it was lost": (lambda stage: stage.run(zombie(stage)), ["started", "lost"]),
    "its result is left out": (lambda stage: stage.run(Handler(object())), ["started", "omitted", "finished"]),
    "it is bypassed": (
        lambda stage: stage.run().run(bypass=True),
        ["started", "finished", "bypassed", "started", "finished"],
    ),
    "the key is reused": (
        lambda stage: stage.run(payload=1).run(payload=2),
        ["started", "finished", "refused"],
    ),
    "the store is down": (lambda stage: stage.down().run(), ["store_failed", "refused"]),
    "the store is down, run": (lambda stage: stage.down().run(policy=UNGUARDED), ["store_failed", "unprotected"]),
    "the store fails at the end": (
        lambda stage: stage.run(unanswered(stage)),
        ["started", "store_failed", "not_recorded"],
    ),
    "it fails for good, and the store at the end": (
        lambda stage: stage.run(unanswered(stage, ValueError()), FINAL),
        ["started", "store_failed", "not_recorded"],
    ),
    "it is resolved": (
        lambda stage: stage.held().guard().resolve("charge", SECRET, Rerun(), by="ada", reason="asked the bank"),
        ["started", "held", "resolved"],
    ),
    "it is forgotten": (
        lambda stage: stage.run().guard().forget("charge", SECRET),
        ["started", "finished", "forgotten"],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_events_tell_the_story(story: str, stall: Callable[[float], None]) -> None:
    play, kinds = STORIES[story]
    stage = Stage(stall)

    play(stage)

    # How often a store that is down is asked, and when, is not part of the story.
    told = [kind for kind in stage.heard.kinds if kind not in ("store_failed", "not_renewed")]
    assert told == [kind for kind in kinds if kind != "store_failed"]
    assert ("store_failed" in stage.heard.kinds) == ("store_failed" in kinds)
    for event in stage.heard.events:
        assert (event.operation, event.digest) == ("charge", address("charge", SECRET).digest)


def test_every_kind_of_event_belongs_to_a_story() -> None:
    told = {kind for _, kinds in STORIES.values() for kind in kinds}
    assert told == {kind.value for kind in Kind} - {"buried", "not_renewed", "unread"}


def test_what_becomes_of_a_message_outside_of_its_guard_is_told_to_the_listeners_of_the_process() -> None:
    heard: list[Event] = []
    unsubscribe = subscribe(heard.append)

    tell(Kind.BURIED, address("charge", SECRET), detail="it failed 5 times")
    unsubscribe()
    tell(Kind.BURIED, address("charge", SECRET))

    assert [(event.kind, event.operation, event.detail) for event in heard] == [
        ("buried", "charge", "it failed 5 times")
    ]


@pytest.mark.parametrize("story", STORIES)
def test_a_key_never_shows_in_an_error_a_log_or_an_events_detail(
    story: str, caplog: pytest.LogCaptureFixture, stall: Callable[[float], None]
) -> None:
    stage = Stage(stall)
    unsubscribe = subscribe(Handler(error=RuntimeError("a listener that fails")))
    try:
        STORIES[story][0](stage)
    finally:
        unsubscribe()

    for error in stage.errors:
        assert SECRET not in "".join(traceback.format_exception(error))
        assert not isinstance(error, OnefoldError) or error.key in (SECRET, "")
    assert SECRET not in caplog.text
    assert address("charge", SECRET).digest in caplog.text
    assert not any(SECRET in event.detail for event in stage.heard.events)


def test_a_key_never_shows_in_what_a_handler_or_a_guard_looks_like() -> None:
    guard = Guard("memory:", scope=SECRET)

    shown = guard.run("charge", SECRET, lambda: [repr(current()), repr(guard), str(current())]).value

    assert SECRET not in "".join(shown)
    assert address("charge", SECRET, SECRET).digest in shown[0]


@pytest.mark.parametrize("key", [SECRET * 40, f"{SECRET}\0", [SECRET], SECRET.encode()])
def test_a_key_that_cannot_be_used_does_not_show_either(key: Any) -> None:
    with pytest.raises(MissingKey) as refusal:
        Guard("memory:").run("charge", key, pytest.fail)

    assert SECRET not in "".join(traceback.format_exception(refusal.value))


# Listeners.


def test_a_listener_that_raises_breaks_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    deaf, heard = Handler(error=RuntimeError("a listener that fails")), Heard()
    guard = Guard("memory:", on_event=[deaf, heard])

    outcome = guard.run("charge", "pay_1", Handler())

    assert (outcome.value, deaf.starts, heard.kinds) == ("ok", 2, ["started", "finished"])
    assert [line.name for line in caplog.records] == ["onefold", "onefold"]
    assert "a listener failed on started of charge" in caplog.text


def test_a_subscriber_hears_every_guard_until_it_unsubscribes() -> None:
    heard = Heard()
    unsubscribe = subscribe(heard)

    async def handler() -> None:
        return None

    Guard("memory:").run("charge", "pay_1", Handler())
    asyncio.run(AsyncGuard("memory:").run("mail", "pay_1", handler))
    unsubscribe()
    unsubscribe()
    Guard("memory:").run("charge", "pay_1", Handler())

    assert [(event.operation, event.kind) for event in heard.events] == [
        ("charge", Kind.STARTED),
        ("charge", Kind.FINISHED),
        ("mail", Kind.STARTED),
        ("mail", Kind.FINISHED),
    ]


def test_a_listener_that_subscribes_another_does_not_disturb_the_telling() -> None:
    late = Heard()
    ends: list[Callable[[], None]] = []

    def first(event: Event) -> None:
        ends.append(subscribe(late))

    ends.append(subscribe(first))
    try:
        Guard("memory:").run("charge", "pay_1", Handler())
    finally:
        for end in ends:
            end()

    assert late.kinds == ["finished"]


# Errors on their way.


def some_errors() -> list[OnefoldError]:
    named = address("charge", "pay_1", "acme")
    plain = [kind for kind in MEANINGS if issubclass(kind, OnefoldError) and "{" not in kind.says]
    return [
        *(kind.about(named) for kind in plain),
        InProgress.about(named, retry_after=1.5),
        Held.about(named, remark="attempt 1 was abandoned"),
        ClaimLost.about(named, value={"receipt": 7}),
        ResultUnreadable.about(named, expected="Receipt", problem="$.total"),
        RememberedFailure.about(named, type_name="shop.Declined", message="no such card"),
    ]


@pytest.mark.parametrize("error", some_errors(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_is_carried_to_another_process_with_all_it_knows(copied: Any, error: OnefoldError) -> None:
    error.add_note("onefold: a note")

    arrived = copied(error)

    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
    assert (arrived.operation, arrived.key, arrived.scope) == ("charge", "pay_1", "acme")


def test_every_error_that_a_delivery_can_end_in_is_carried_as_it_was_raised(stall: Callable[[float], None]) -> None:
    raised: list[BaseException] = []
    for play, _ in STORIES.values():
        stage = Stage(stall)
        play(stage)
        raised += stage.errors

    arrived = [pickle.loads(pickle.dumps(error)) for error in raised]

    assert [(type(error), str(error)) for error in arrived] == [(type(error), str(error)) for error in raised]
    assert {Held, InProgress, KeyReused, ClaimLost} <= {type(error) for error in arrived}


# What is told when.


def test_a_transactional_run_is_told_as_finished_when_it_is_committed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    states: list[Any] = []

    def hear(event: Event) -> None:
        with Guard(url) as other:
            record = other.read("charge", "pay_7f3a")
        states.append((event.kind, None if record is None else record.state))

    with Guard(url, on_event=hear) as guard:

        @guard.transactional("charge", key="key")
        def charge(key: str, *, tx: Any) -> None:
            tx.execute("CREATE TABLE paid (key)")

        charge("pay_7f3a")  # type: ignore[call-arg]

    assert states == [(Kind.STARTED, None), (Kind.FINISHED, "done")]


def test_a_batch_without_a_handler_tells_of_each_message(tmp_path: Path) -> None:
    heard = Heard()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, Guard("memory:", on_event=heard) as guard:
        with connection:
            connection.execute("BEGIN")
            guard.within(connection).fresh("charge", ["known"], key=str)
        heard.events.clear()
        with connection:
            connection.execute("BEGIN")
            guard.within(connection).fresh("charge", ["new", "known", "newer"], key=str)

    told = [(event.address.key, event.kind) for event in heard.events]
    assert told == [
        *(("new", Kind.STARTED), ("new", Kind.FINISHED)),
        ("known", Kind.REPLAYED),
        *(("newer", Kind.STARTED), ("newer", Kind.FINISHED)),
    ]


@pytest.mark.parametrize(
    ("policy", "told"), [(Policy(), Kind.RELEASED), (FINAL, Kind.FAILED)], ids=["released", "remembered"]
)
def test_a_handler_that_raises_in_a_transaction_has_an_outcome(policy: Policy, told: Kind, tmp_path: Path) -> None:
    heard = Heard()
    with Guard(f"sqlite:///{tmp_path}/shop.db", on_event=heard, policy=policy) as guard:

        @guard.transactional("charge", key="key")
        def charge(key: str, *, tx: Any) -> None:
            raise ValueError("declined")

        with pytest.raises(ValueError, match="declined"):
            charge("pay_7f3a")  # type: ignore[call-arg]

    assert [event.kind for event in heard.events] == [Kind.STARTED, told]
    assert heard.events[-1].detail == "ValueError"


@pytest.mark.parametrize(
    ("policy", "told"), [(Policy(), Kind.RELEASED), (FINAL, Kind.FAILED)], ids=["released", "remembered"]
)
def test_a_handler_that_raises_in_seen_mode_has_an_outcome(policy: Policy, told: Kind) -> None:
    heard = Heard()
    guard = Guard("memory:", on_event=heard, policy=policy.replace(mode="seen"))

    with pytest.raises(ValueError, match="declined"):
        guard.run("charge", "pay_7f3a", Handler(error=ValueError("declined")))

    assert [event.kind for event in heard.events] == [Kind.STARTED, told]
