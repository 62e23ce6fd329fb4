"""Handle errors of a user's code, of whatever class: they surface unchanged.

A class may refuse to be changed, as a frozen dataclass does, or fail to describe itself. The context managers of
`contextlib` assign to an error that passes through them, and raise that refusal in its place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Passing(AbstractContextManager[T], Generic[T]):
    def __init__(self, work: Generator[T, None, None]) -> None:
        self._work = work

    def __enter__(self) -> T:
        return next(self._work)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            next(self._work, None)
            return
        try:
            self._work.throw(error)
        except BaseException as raised:
            if not _is_the_same(raised, error):
                raise
            BaseException.with_traceback(error, traceback)


class _PassingAsync(AbstractAsyncContextManager[T], Generic[T]):
    def __init__(self, work: AsyncGenerator[T, None]) -> None:
        self._work = work

    async def __aenter__(self) -> T:
        return await anext(self._work)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            with suppress(StopAsyncIteration):
                await anext(self._work)
            return
        try:
            await self._work.athrow(error)
        except BaseException as raised:
            if not _is_the_same(raised, error):
                raise
            BaseException.with_traceback(error, traceback)


def _is_the_same(raised: BaseException, error: BaseException) -> bool:
    """Return whether a generator raised what was thrown in; it cannot raise the end of an iteration itself."""
    ends = isinstance(error, (StopIteration, StopAsyncIteration)) and isinstance(raised, RuntimeError)
    return raised is error or (ends and raised.__cause__ is error)


def as_raised(error: BaseException) -> BaseException:
    """Return the error that a generator was left with: it cannot raise a StopIteration, but a handler can."""
    if isinstance(error.__cause__, StopIteration) and error.args == ("generator raised StopIteration",):
        return error.__cause__
    return error


def passing(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Make a context manager of a generator that yields once, and raises every error that is thrown into it."""

    generator = cast("Callable[P, Generator[T, None, None]]", function)

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Passing(generator(*args, **kwargs))

    return made


def passing_async(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Make an async context manager likewise."""

    generator = cast("Callable[P, AsyncGenerator[T, None]]", function)

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _PassingAsync(generator(*args, **kwargs))

    return made


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, unless its class refuses that."""
    with suppress(Exception):
        error.add_note(text)


def class_name(error: BaseException) -> str:
    """Return the name of an error's class, with its module unless it is Python's or ours."""
    kind = type(error)
    module = kind.__module__
    known = module == "builtins" or module.partition(".")[0] == "onefold"
    return kind.__name__ if known else f"{module}.{kind.__qualname__}"


def line_of(error: BaseException, most: int) -> str:
    """Return what an error says as one line that can be printed, of at most this many characters."""
    line = " ".join(text_of(error).split())
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def repr_of(value: object) -> str:
    """Return what a value looks like; its class, if it fails to show anything."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - its own code
        return f"<{type(value).__qualname__}>"


def text_of(error: BaseException) -> str:
    """Return what an error says; its class, if it fails to say anything."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its own code
        return f"<{type(error).__qualname__}>"
