"""The public names: complete, sorted, and nothing else."""

from __future__ import annotations

import inspect

import onefold


def test_all_public_names_are_listed_and_sorted() -> None:
    public = {name for name, value in vars(onefold).items() if not name.startswith("_") and not inspect.ismodule(value)}

    assert list(onefold.__all__) == sorted(onefold.__all__)
    assert set(onefold.__all__) == public


def test_every_error_is_exported() -> None:
    errors = {
        name
        for name, value in vars(onefold.errors).items()
        if inspect.isclass(value) and issubclass(value, onefold.OnefoldError)
    }

    assert errors <= set(onefold.__all__)
