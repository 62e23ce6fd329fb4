"""Tell type checkers how a decorated function becomes a method: its first argument says which kind."""

from __future__ import annotations

from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
S_contra = TypeVar("S_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Method(Protocol[S_contra, P, R_co]):
    """A function that can be bound to its first argument: an instance, or a class.

    `Concatenate[S, P]` would say the same, but mypy does not infer `S` from it, and takes a static method for a method
    of the instance.
    """

    def __call__(self, first: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
