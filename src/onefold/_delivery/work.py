"""One delivery as a flow sees it, and the conversion between its values and records. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from onefold._checks import with_article
from onefold._concurrency.users_errors import add_note, text_of
from onefold._delivery import decide as _decide
from onefold._delivery.handler_steps.left import StepsLeft, warning
from onefold._model import Address, DeliveryRequest, DoneRecord, Ending, Entry, NotKept, Outcome, Record, State
from onefold._model.notes import with_noted
from onefold._model.policy import Policy
from onefold._model.remarks import earlier_in, latest_of
from onefold.codecs import Codec, Unreadable, Unstorable, type_name
from onefold.errors import OnefoldError, RememberedFailure, ResultUnreadable
from onefold.events import LISTENERS, Kind, Teller

# On Python 3.11 accessing an enum's members is slow.
DONE: Final = State.DONE
REPLAYED: Final = Kind.REPLAYED


NOT_KEPT: Final = (
    "Annotate the handler's return type (or pass returns=), raise max_result_bytes, or set keep_result=False. `onefold "
    "show` says why"
)


class Delivery(msgspec.Struct, frozen=True):
    """Everything that a flow needs to know about one delivery."""

    request: DeliveryRequest
    policy: Policy
    call: Callable[[], Any]
    returns: Any
    codec: Codec
    tell: Teller
    mint: Callable[[], bytes]


UNCOMPARED: Final = (
    "the payload could not be compared in full with that of the record: a release has renamed an argument, or another "
    "function made the record. The same key with another payload may be replayed as if it were a duplicate. Keep the "
    "names of arguments, or name those that count with fingerprint="
)


def tell_if_uncompared(delivery: Delivery, found: bytes | None) -> None:
    if _decide.uncompared(found, delivery.request.fingerprint):
        delivery.tell.warn(delivery.request.address, UNCOMPARED, about="payload")


NOT_RECORDED: Final = (
    "it ran to its end, but the store could not record it in time. A later duplicate finds it as if its worker had "
    "crashed: under after_crash='rerun' it runs again"
)


def tell_not_recorded(delivery: Delivery, attempt: int, detail: str = "") -> None:
    delivery.tell(Kind.NOT_RECORDED, delivery.request.address, attempt, detail)
    delivery.tell.warn_each(delivery.request.address, NOT_RECORDED)


def tell_steps_left(delivery: Delivery, error: BaseException | None, steps: StepsLeft) -> None:
    """Warn about steps whose outcome is unknown, each time: somebody has to look at every one of them."""
    text = warning(error, steps) if any(steps) else None
    if text is not None:
        delivery.tell.warn_each(delivery.request.address, text)


def refused(delivery: Delivery, error: OnefoldError) -> OnefoldError:
    delivery.tell(Kind.REFUSED, delivery.request.address, detail=type(error).__name__)
    return error


def not_kept(address: Address, returns: Any) -> NotKept | None:
    """Return the placeholder for a result that was not kept; nothing is missing if the handler returns None."""
    return None if returns is type(None) else NotKept(address)


def replay(found: DoneRecord, address: Address, returns: Any, codec: Codec, tell: Teller) -> Outcome[Any]:
    """Return the stored result as an outcome. Raises `ResultUnreadable` if it does not fit today's type."""
    kept = not_kept(address, returns) if found.omitted else None
    if found.result is not None:
        try:
            kept = codec.decode(found.result, returns)
        except Unreadable as error:
            raise ResultUnreadable.about(address, expected=type_name(returns), problem=str(error)) from error
    if tell.own or LISTENERS:
        tell(REPLAYED, address, found.attempt)
    return Outcome(
        kept=kept,
        replayed=True,
        attempt=found.attempt,
        omitted=found.omitted,
        remark=found.remark and latest_of(found.remark),
    )


PROBES_NOT_KEPT: Final = (
    "It has to answer with a value of the type that the handler returns, {type}, and of at most max_result_bytes; or "
    "with Done() alone, where there is none. `onefold show` says why"
)


def done_ending(
    delivery: Delivery,
    value: Any,
    attempt: int,
    struck: list[BaseException] | None = None,
    *,
    noted: bytes | None = None,
    probed: bool = False,
) -> Ending:
    """Return the ending of a handler that returned or, with `probed`, of a run that the probe says is done.

    An interrupt that came meanwhile is raised; or it is appended to `struck`, and the caller who passed that raises it
    once the ending is stored: its effect has happened.
    """
    notes = with_noted(None, noted) if noted else None
    if value is None:
        return Ending(state=DONE, ttl=delivery.policy.keep, notes=notes)
    result, omitted = encode(delivery, value, attempt, struck, probed=probed)
    return Ending(
        state=DONE,
        ttl=delivery.policy.keep,
        result=result,
        omitted=omitted is not None,
        notes=notes,
        remark=omitted or "",
    )


def with_history(ending: Ending, entry: Entry) -> Ending:
    """Return the ending with what people have said about earlier runs of this entry."""
    if not entry.remark:
        return ending
    return msgspec.structs.replace(ending, remark=ending.remark + earlier_in(entry.remark))


def ended_entry(entry: Entry, ending: Ending) -> Entry:
    """Return the entry of a run that has ended before its record is written."""
    ending = with_history(ending, entry)
    return _decide.change(
        entry,
        state=ending.state,
        lease=0.0,
        ttl=ending.ttl,
        notes=ending.notes,
        result=ending.result,
        omitted=ending.omitted,
        remark=ending.remark,
    )


def encode(
    delivery: Delivery, value: Any, attempt: int, struck: list[BaseException] | None = None, *, probed: bool = False
) -> tuple[bytes | None, str | None]:
    """Return the bytes to store, and the reason if a result is left out."""
    address = delivery.request.address
    if not delivery.policy.keep_result:
        why = "keep_result=False"
    else:
        stored, why = as_stored(delivery, value, delivery.returns, struck)
        if stored is not None:
            return stored, None
        kind = type(value).__name__
        if probed:
            why, advice = f"the probe's answer: {why}", PROBES_NOT_KEPT.format(type=type_name(delivery.returns))
            text = f"the probe's answer, Done({kind}), was not kept, and its duplicates get no result. {advice}"
        else:
            text = f"{with_article(kind)} was not kept, and its duplicates get no result. {NOT_KEPT}"
        delivery.tell.warn(address, text, about="probe" if probed else "")
    delivery.tell(Kind.OMITTED, address, attempt, why)
    return None, why


def as_stored(
    delivery: Delivery, value: Any, returns: Any, struck: list[BaseException] | None = None
) -> tuple[bytes | None, str]:
    """Return the bytes of a value of this type, or the reason why there are none. For `struck` see `done_ending`."""
    struck, raises = ([], True) if struck is None else (struck, False)
    try:
        try:
            stored = as_bytes(delivery.codec.encode(value, returns))
        except BaseException as first:  # noqa: BLE001 - raised by whoever passed `struck`, or here
            stored = encoded_again(delivery.codec, value, returns, first, struck)
    except Exception as error:  # noqa: BLE001 - even a user's own codec must not lose the effect
        return None, plain(text_of(error))
    if struck and raises:
        raise struck[0]
    if len(stored) <= delivery.policy.max_result_bytes:
        return stored, ""
    return None, f"{len(stored)} bytes, and max_result_bytes={delivery.policy.max_result_bytes}"


def encoded_again(codec: Codec, value: Any, returns: Any, first: BaseException, struck: list[BaseException]) -> bytes:
    """Encode a value once more after an error. If that was an interrupt, it is appended to `struck`.

    A codec, and the value's own classes, may raise anything. An error that does not recur came from outside, as from a
    signal handler. The first attempt is the caller's own: a function around it could be interrupted as it begins.
    """
    again = as_bytes(codec.encode(value, returns))
    struck.append(first.__cause__ if isinstance(first, Unstorable) and first.__cause__ is not None else first)
    return again


def as_bytes(encoded: Any) -> bytes:
    """Return a codec's output as the bytes that every store takes. Raises `TypeError` for anything else."""
    if isinstance(encoded, bytes):
        return encoded
    if isinstance(encoded, (bytearray, memoryview)):
        return bytes(encoded)
    raise TypeError(f"the codec returned {type(encoded).__name__} instead of bytes")


def plain(text: str) -> str:
    """Return text that every store can keep: some do not allow NUL, and none allows half a surrogate."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")


def stored_error(delivery: Delivery, found: Record) -> Exception:
    """Return the remembered exception, rebuilt if its class is one that the policy remembers."""
    try:
        stored = {} if found.result is None else delivery.codec.decode(found.result, Any)
    except Unreadable:
        stored = {}
    type_name, message = stored.get("type", "an error"), stored.get("message", found.latest_remark)
    for kind in _with_subclasses(delivery.policy.final_errors):
        if _full_name(kind) == type_name and "args" in stored:
            error = _rebuilt(kind, stored["args"], message)
            if error is not None:
                return error
    return RememberedFailure.about(delivery.request.address, type_name=type_name, message=message)


def _rebuilt(kind: type[Exception], args: list[Any], message: str) -> Exception | None:
    """Rebuild the error, or return None if its class has changed since."""
    try:
        error = kind(*args)
    except Exception:  # noqa: BLE001 - a constructor that has changed since
        return None
    if text_of(error) != message:
        return None
    add_note(error, "onefold: replayed; the failure was remembered as final")
    return error


def failed_ending(delivery: Delivery, error: Exception | str, noted: bytes | None = None) -> Ending:
    # A person's text is not an exception, and has no type.
    named = "" if isinstance(error, str) else _full_name(type(error))
    facts: dict[str, Any] = {"type": named, "message": error if isinstance(error, str) else text_of(error)}
    if isinstance(error, Exception) and _can_be_rebuilt(error):
        facts["args"] = list(error.args)
    for attempt in (facts, {name: facts[name] for name in ("type", "message")}):
        try:
            result: bytes | None = as_bytes(delivery.codec.encode(attempt, Any))
            break
        except Exception:  # noqa: BLE001 - the arguments cannot be stored: the name and the message can
            result = None
    return Ending(
        state=State.FAILED,
        ttl=delivery.policy.keep,
        result=result,
        notes=with_noted(None, noted),
        remark=f"failed: {type(error).__name__}",
    )


def _can_be_rebuilt(error: Exception) -> bool:
    """Return whether its class and arguments make the same error again, as they do for most exceptions."""
    try:
        again = type(error)(*error.args)
        # Notes are for people, and are not part of the message.
        attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
        return bool(text_of(again) == text_of(error) and again.args == error.args and vars(again) == attributes)
    except Exception:  # noqa: BLE001 - a constructor with other arguments, values that cannot be compared
        return False


def _with_subclasses(kinds: tuple[type[Exception], ...]) -> list[type[Exception]]:
    found = list(kinds)
    for kind in found:
        found.extend(kind.__subclasses__())
    return found


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
