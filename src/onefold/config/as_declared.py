"""A guard that enforces its file: the linted declaration is what runs; anything else is refused with its line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from onefold import AsyncGuard, Guard, UsageError
from onefold._checks import did_you_mean
from onefold.config.declared import DeclaredGuard

# By mode: the ways to deliver that have a crash window although the file promises none.
CLAIMING: Final = ("idempotent", "run", "run_batch")

if TYPE_CHECKING:
    from onefold import Guard as Delivering
else:
    # For sync and async: both have the same names.
    Delivering = object


class AsDeclared(Delivering):
    """Refuse anything that the file does not declare: another operation, or a claim where it says transactional.

    A `policy=` in code replaces the file's, as with every guard; the lint does not see it.
    """

    declared: DeclaredGuard
    origin: str

    def idempotent(self, operation: str, **options: Any) -> Any:
        self._check(operation, "idempotent")
        return super().idempotent(operation, **options)

    def transactional(self, operation: str, **options: Any) -> Any:
        self._check(operation, "transactional")
        return super().transactional(operation, **options)

    def run(self, operation: str, *parts: Any, **options: Any) -> Any:
        self._check(operation, "run")
        return super().run(operation, *parts, **options)

    def run_batch(self, operation: str, *parts: Any, **options: Any) -> Any:
        self._check(operation, "run_batch")
        return super().run_batch(operation, *parts, **options)

    def within(self, connection: Any, **options: Any) -> Any:
        return WithinAsDeclared(super().within(connection, **options), self)

    def __repr__(self) -> str:
        return f"<the guard {self.declared.name!r} of {self.origin}>"

    def _check(self, operation: str, way: str) -> None:
        declared = self.declared
        if callable(operation):
            # A decorator without parentheses, which the guard refuses.
            return
        if not declared.any_operation and operation not in declared.operations:
            raise UsageError(
                f"{self.origin}: the guard {declared.name!r} is for {', '.join(map(repr, declared.operations))}, not "
                f"for {operation!r}{did_you_mean(operation, declared.operations) or ': declare it there'}"
            )
        if declared.mode == "transactional" and way in CLAIMING:
            raise UsageError(
                f"{self.origin}: the guard {declared.name!r} is declared as mode: transactional, and {way}() has a "
                "crash window: use transactional() or within(), or declare mode: claim there"
            )


class WithinAsDeclared:
    """A declared guard inside a transaction that the caller owns."""

    def __init__(self, within: Any, guard: AsDeclared) -> None:
        self._within = within
        self._guard = guard

    def run(self, operation: str, *parts: Any, **options: Any) -> Any:
        self._guard._check(operation, "within")
        return self._within.run(operation, *parts, **options)

    def fresh(self, operation: str, *parts: Any, **options: Any) -> Any:
        self._guard._check(operation, "within")
        return self._within.fresh(operation, *parts, **options)

    def _sort_out_rows(self, operation: str, *parts: Any) -> Any:
        self._guard._check(operation, "within")
        return self._within._sort_out_rows(operation, *parts)


class GuardAsDeclared(AsDeclared, Guard):
    """A `Guard` as a file declares it."""


class AsyncGuardAsDeclared(AsDeclared, AsyncGuard):  # type: ignore[misc] # its own base is `object`
    """An `AsyncGuard` as a file declares it."""
