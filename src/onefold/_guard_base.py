"""The base of both guards: everything but sync and async."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from onefold import keys
from onefold._delivery.claim import deliver
from onefold._delivery.context import Opened, Place, Toolbox
from onefold._delivery.drive import Flow
from onefold._delivery.joined import join, transact
from onefold._delivery.migration import looking_back, looking_back_first, looking_back_joined
from onefold._delivery.seen import look
from onefold._delivery.work import Work
from onefold._fingerprint import of_whole, recipe_of_whole
from onefold._fingerprint.canonical import has_no_form
from onefold._forks import set_lock
from onefold._handlers.arguments import (
    Call,
    FingerprintOf,
    KeyOf,
    ScopeOf,
    check_function,
    check_probe,
    check_scope_is_no_argument,
    full_name,
    name_of,
    named_scope,
    returns_of,
)
from onefold._heartbeat.beats import AsyncHeartbeat, Heartbeat
from onefold._model import Address, Asked, Fresh, Outcome, Policy
from onefold.codecs import Codec, MsgspecCodec
from onefold.current import is_inside
from onefold.errors import InsideItself, ResultNotKept, UsageError
from onefold.events import Listener, Teller
from onefold.keys import Key
from onefold.stores.base import Joinable
from onefold.stores.opening import check_source, open_store, without_password

T = TypeVar("T")
M = TypeVar("M")

TOKEN_BYTES: Final = 16

# Bounds one round trip: larger batches are taken in parts of this size.
BATCH_MAX: Final = 1_000

_PAYLOAD: Final = recipe_of_whole("payload")

mint: Callable[[], bytes] = functools.partial(os.urandom, TOKEN_BYTES)


class Front:
    """Options, checks and the preparation of a delivery. `Guard` and `AsyncGuard` add sync and async."""

    _awaited = False
    # Of its colour: the driver of flows, and the heartbeat.
    _conduct: Callable[..., Any]
    _heartbeat: type[Heartbeat | AsyncHeartbeat]
    _opening: threading.Lock

    def __init__(
        self,
        store: Any,
        *,
        policy: Policy | None = None,
        scope: str | Callable[[], str | None] | None = None,
        on_event: Listener | Iterable[Listener] = (),
        codec: Codec | None = None,
        also_read: Any = None,
    ) -> None:
        check_source(store, awaited=self._awaited)
        if also_read is not None:
            check_source(also_read, awaited=self._awaited)
            if also_read is store or also_read == store:
                raise UsageError("also_read= names the store itself: name the one in which the records were before")
        self.policy = Policy() if policy is None else self._checked(policy)
        self._scope = scope if callable(scope) or scope is None else keys.checked_scope(scope)
        self._codec: Codec = MsgspecCodec() if codec is None else codec
        self._tell = Teller(on_event)
        self._policies: dict[str, Policy] = {}
        # By operation, the first function that was decorated for it.
        self._functions: dict[str, str] = {}
        # The type that the codec has accepted last: mostly it is the next one too.
        self._storable: Any = object()
        self._source = store
        self._also_read = also_read
        self._opened: Opened | None = None
        set_lock(self, "_opening")
        self._closed = False

    def address(self, operation: str, key: Key, *, scope: str | None = None) -> Address:
        """Return the address of this key's record. Use its `digest` in logs, never the key."""
        return keys.address(operation, key, self._scoped(scope))

    @property
    def store(self) -> Any:
        """Return the store, opened if it was not yet."""
        return self._tools().store

    def _tools(self) -> Toolbox:
        opened = self._opened
        return self._open().tools if opened is None else opened.tools

    def _open(self) -> Opened:
        with self._opening:
            if self._closed:
                raise UsageError("this guard is closed")
            if self._opened is None:
                store, ours = open_store(self._source, awaited=self._awaited)
                old, old_is_ours = None, False
                if self._also_read is not None:
                    old, old_is_ours = open_store(self._also_read, awaited=self._awaited)
                self._opened = Opened(self._toolbox(store), ours, old, old_is_ours)
            return self._opened

    def _looking(self, flow: Flow[T]) -> Flow[T]:
        """Run the flow, taking into account the records of the store that is read as well."""
        return flow if self._also_read is None else looking_back(flow, self._open().old)

    def _transact(self, work: Work) -> Flow[Outcome[Any]]:
        flow = transact(work)
        if self._also_read is None:
            return flow
        return looking_back_first(flow, work.asked.address, self._open().old, self.store)

    def _join(self, work: Work) -> Flow[Outcome[Any]]:
        return self._looking_joined(join(work))

    def _looking_joined(self, flow: Flow[T]) -> Flow[T]:
        return flow if self._also_read is None else looking_back_joined(flow, self._open().old, self.store)

    def _toolbox(self, store: Any) -> Toolbox:
        """For deliveries that claim."""
        heartbeat = self._heartbeat(lambda: store, self._tell)
        return Toolbox(store, self._codec, self._tell, self._conduct, awaits=self._awaited, heartbeat=heartbeat)

    def _tools_on(self, joined: Any, connection: Any) -> Toolbox:
        """For deliveries inside a transaction of the caller's: no claim is to be kept alive there."""
        return Toolbox(joined, self._codec, self._tell, self._conduct, awaits=self._awaited, home=connection)

    def _inside(self, transaction: Any) -> Toolbox:
        """For deliveries inside a transaction of our own."""
        home = self._tools().home
        return Toolbox(
            transaction,
            self._codec,
            self._tell,
            self._conduct,
            awaits=self._awaited,
            home=home,
            transaction=transaction,
        )

    def _check_column(self, record: object) -> None:
        if record is not None and self._also_read is not None:
            raise UsageError("record= keeps the records in your own table: there is no also_read= for them")

    def _joinable(self) -> Joinable:
        store = self.store
        if not isinstance(store, Joinable):
            raise UsageError(
                f"{type(store).__name__} has no transactions of its own: use a store in your database, such as "
                "sqlite:///app.db, or guard.within(connection)"
            )
        return store

    def _swap(self, source: Any) -> Place:
        """Put another store in place; the answer is what was there. For `onefold.testing.use`."""
        check_source(source, awaited=self._awaited)
        return self._put(Place(source))

    def _put(self, place: Place) -> Place:
        with self._opening:
            before = Place(self._source, self._also_read, self._opened, self._closed)
            self._source, self._also_read, self._opened, self._closed = place
        return before

    def _work(
        self,
        asked: Asked,
        call: Callable[[], Any],
        returns: Any,
        policy: Policy | None,
    ) -> Work:
        return Work(asked, self._chosen(policy), call, returns, self._codec, self._tell, mint)

    def _chosen(self, policy: Policy | None) -> Policy:
        """Return the policy that was passed, or the guard's."""
        return self.policy if policy is None else self._checked(policy)

    def _checked(self, policy: object) -> Policy:
        if not isinstance(policy, Policy):
            raise UsageError(f"policy={type(policy).__name__} has to be a Policy: write policy=Policy(keep='7d')")
        check_probe(policy.after_crash, awaited=self._awaited)
        return policy

    def _check_outside(self, asked: Asked, home: object = None) -> None:
        if is_inside(asked.address, self._tools().home if home is None else home):
            raise InsideItself.about(asked.address)

    def _joined_policy(self, policy: Policy | None) -> Policy:
        """The policy inside a transaction of the caller's, whose rollback would take a remembered failure back."""
        found = self._chosen(policy)
        if found.remember:
            raise UsageError(
                "within() cannot remember a failure: the rollback takes it back. Use transactional(), or pass "
                "policy=guard.policy.but(remember=())"
            )
        return found

    def _fresh_works(
        self,
        messages: Sequence[M],
        operation: str,
        key: Callable[[M], object],
        scope: str | Callable[[M], str] | None,
        fingerprint: Callable[[M], object] | None,
        policy: Policy | None,
        joined: tuple[Any, object],
    ) -> list[Work | Exception]:
        """Prepare a batch in a caller's transaction; nothing is called: the caller does the work."""
        connection, record = joined
        if record is not None:
            raise UsageError("fresh() writes records of its own, and cannot with record=. Use run() for each message")
        policy = self._joined_policy(policy)
        return [
            self._batch_work(message, operation, key, _nothing, Any, scope, fingerprint, policy, connection)
            for message in messages
        ]

    def _deliver(self, work: Work, tools: Toolbox) -> Flow[Outcome[Any]]:
        if is_inside(work.asked.address, tools.home):
            raise InsideItself.about(work.asked.address)
        flow = look(work) if work.policy.mode == "seen" else deliver(work)
        return flow if self._also_read is None else self._looking(flow)

    def _asked(
        self, operation: str, key: object, scope: str | None, payload: object = None, *, bypass: bool = False
    ) -> Asked:
        address = keys.address(operation, key, self._scoped(scope))
        try:
            fingerprint = None if payload is None else of_whole(_PAYLOAD, address.parts, payload)
        except Exception as error:
            if not has_no_form(payload):
                raise
            raise UsageError(
                f"{operation}: fingerprint={type(payload).__name__}: the payload cannot be fingerprinted: {error}. "
                "Nothing ran"
            ) from error
        return Asked(address, fingerprint, bypass)

    def _asked_by(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, bypass: bool = False) -> Asked:
        scope, key, fingerprint = call.read(args, kwargs)
        return Asked(Address(scope, call.operation, key), fingerprint, bypass)

    def _scoped(self, scope: str | None) -> str | None:
        if scope is not None or not callable(self._scope):
            return self._scope if scope is None else scope  # type: ignore[return-value]
        return named_scope(self._scope(), "the guard's scope=")

    def _by_hand(self, operation: str, key: object, scope: str | None, returns: Any = Any) -> Work:
        """Return what the record tools need: an address, and nothing to run."""
        return self._work(self._asked(operation, key, scope), _nothing, returns, self._policies.get(operation))

    def _batch_work(
        self,
        message: M,
        operation: str,
        key: Callable[[M], object],
        call: Callable[[], Any],
        returns: Any,
        scope: str | Callable[[M], str] | None,
        fingerprint: Callable[[M], object] | None,
        policy: Policy | None,
        home: object = None,
    ) -> Work | Exception:
        """Prepare the work for one message; if its key is unusable, return the error in its place."""
        try:
            whose = named_scope(scope(message), f"{operation}: scope=") if callable(scope) else scope
            payload = None if fingerprint is None else fingerprint(message)
            asked = self._asked(operation, key(message), whose, payload)
            self._check_outside(asked, home)
            return self._work(asked, call, returns, policy)
        except Exception as error:  # noqa: BLE001 - one poison message never fails its neighbours
            return error

    def _prepared(
        self,
        function: Callable[..., Any],
        operation: str,
        key: KeyOf,
        scope: ScopeOf,
        fingerprint: FingerprintOf,
        policy: Policy | None,
        returns: Any,
        *,
        injects_tx: bool = False,
    ) -> tuple[Call, Callable[[], Any]]:
        """Return what a decorator needs: how to read the arguments, and the result's type, checked now if possible."""
        check_function(function, awaited=self._awaited, guard=type(self).__name__)
        if policy is not None:
            # Whoever resolves a record by hand names its operation, and means that operation's own policy.
            self._policies[operation] = self._checked(policy)
        if isinstance(scope, str):
            check_scope_is_no_argument(function, scope)
        if scope is None:
            scope = self._scope if not callable(self._scope) else lambda *_args, **_kwargs: self._scoped(None)
        call = Call(function, operation, key, scope, fingerprint, injects_tx=injects_tx)
        self._tell_if_shared(operation, full_name(function))

        @functools.cache
        def result_type() -> Any:
            return self._returns(function, returns, policy)

        try:
            result_type()
        except NameError:
            # The annotation names something that is defined further down; the first call looks again.
            return call, functools.partial(_named, function, result_type)
        return call, result_type

    def _tell_if_shared(self, operation: str, name: str) -> None:
        """Warn if two functions share one operation, and so their records, which is hardly ever meant."""
        first = self._functions.setdefault(operation, name)
        if first != name:
            self._tell.warn(
                operation,
                f"{first}() and {name}() are both this operation, and so share its records: a key that one has "
                "finished is replayed by the other, and only arguments of the same name are compared. Give each "
                "an operation of its own, unless both do the same thing",
                about=name,
            )

    def _returns(self, function: Callable[..., Any], returns: Any, policy: Policy | None) -> Any:
        """Return the checked type of a function's result. Raises `NameError` if its annotation has no value yet."""
        if returns is Any:
            returns = returns_of(function)
        if returns is not self._storable and self._chosen(policy).keep_result:
            self._check_returns(function, returns)
        return returns

    def _returns_now(self, function: Callable[..., Any], returns: Any, policy: Policy | None) -> Any:
        try:
            return self._returns(function, returns, policy)
        except NameError as error:
            raise _unreadable(function, error) from error

    def _check_returns(self, function: Callable[..., Any], returns: Any) -> None:
        try:
            self._codec.check(returns)
        except UsageError as error:
            raise UsageError(f"what {name_of(function)}() returns cannot be remembered: {error}") from error
        self._storable = returns

    def __repr__(self) -> str:
        source = self._source
        shown = repr(without_password(source)) if isinstance(source, str) else type(source).__name__
        return f"{type(self).__name__}({shown})"


def unwrap(outcome: Outcome[T], asked: Asked, returns: Any) -> T:
    """Return the value, as a decorated function returns it."""
    if outcome.replayed and outcome.omitted and returns is not type(None):
        raise ResultNotKept.about(asked.address, remark=outcome.remark)
    return outcome.value


def _nothing() -> None:
    """Do nothing: for work that runs no handler."""


def _named(function: Callable[..., Any], result_type: Callable[[], Any]) -> Any:
    try:
        return result_type()
    except NameError as error:
        raise _unreadable(function, error) from error


def _unreadable(function: Callable[..., Any], error: NameError) -> UsageError:
    return UsageError(
        f"the return annotation of {name_of(function)}() cannot be read: {error}. Nothing ran. "
        "Pass the type as returns="
    )


def moment() -> str:
    """Return the time for people: when somebody resolved a record. Nothing is decided by it."""
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def sorted_by(messages: Sequence[M], verdicts: Sequence[bool | Exception]) -> Fresh[M]:
    """Return a batch as its caller sees it."""
    pairs = list(zip(messages, verdicts, strict=True))
    return Fresh(
        new=[message for message, verdict in pairs if verdict is True],
        seen=[message for message, verdict in pairs if verdict is False],
        unsettled=[message for message, verdict in pairs if isinstance(verdict, Exception)],
        problems=[verdict for verdict in verdicts if isinstance(verdict, Exception)],
    )
