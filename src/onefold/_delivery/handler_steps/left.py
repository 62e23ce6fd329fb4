"""The steps whose outcome is unknown when a handler ends, and the messages about them. Pure; no imports of ours."""

from __future__ import annotations

from typing import Final, NamedTuple

WAIT_FOR_ALL: Final = (
    "Wait for every step before the handler ends, and cancel none: asyncio.gather(..., return_exceptions=True), or "
    "result() of each future, and raise after that"
)


class StepsLeft(NamedTuple):
    """The steps with an unknown outcome of a handler that has ended, by name."""

    # Still running, in a task or a thread for which the handler did not wait.
    under_way: tuple[str, ...] = ()
    # Begun, and then cancelled or interrupted.
    interrupted: tuple[str, ...] = ()
    # Created, and never awaited: they did not happen, and cannot any more.
    unbegun: tuple[str, ...] = ()


NONE_LEFT: Final = StepsLeft()


def warning(error: BaseException | None, steps: StepsLeft) -> str | None:
    """Return the warning for the author of the handler; None: nothing is unusual."""
    if steps.under_way:
        named = _named(steps.under_way)
        if error is None:
            return (
                f"its handler returned while {named} under way: the delivery is done, and nobody will notice a failure "
                f"there. {WAIT_FOR_ALL}"
            )
        return (
            f"its handler ended in {type(error).__name__} while {named} under way, so nobody knows what becomes "
            "of it. It counts as a crash: the claim stays until its lease ends, and then after_crash decides. "
            f"{WAIT_FOR_ALL}"
        )
    # A cancellation of the handler itself is not its own mistake.
    if steps.interrupted and isinstance(error, Exception):
        return (
            f"its handler ended in {type(error).__name__} after {_named(steps.interrupted)} interrupted, so that "
            "nobody knows whether it happened. It counts as one of the `ambiguous_errors`: after_crash decides. "
            f"{WAIT_FOR_ALL}"
        )
    if steps.unbegun and error is None:
        return (
            f"its handler returned, and {_named(steps.unbegun)} never begun: it did not happen, and the delivery is "
            "done. Write `await current().step(...)`"
        )
    return None


def as_remark(steps: StepsLeft) -> str:
    """Return the end of a held record's remark: a person has to find out what happened to these."""
    return f", after {_named(steps.interrupted)} interrupted" if steps.interrupted else ""


def _named(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"its step {names[0]!r} was"
    return f"its steps {', '.join(map(repr, names))} were"
