"""The value of a literal in parsed Python, calculated without running anything. Pure."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from onefold.lint.settings.found import NUMBER_MAX

# Deeper than anybody writes. Python's own limit is another's: a library may raise it.
NESTED_MAX: Final = 100


class NotLiteral(ValueError):
    """A value that only running the file would tell."""


def literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a number, a text, a sum or product of numbers, a `timedelta`, or a name for one of them."""
    return _literal(node, names, NESTED_MAX)


def _literal(node: ast.expr, names: Mapping[str, Any], deeper: int) -> Any:
    if not deeper:
        raise NotLiteral

    def number(inner: ast.expr) -> float:
        return _number(_literal(inner, names, deeper - 1))

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -number(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operator, right=right):
            return _calculated(operator, number(left), number(right))
        case ast.Call(func=ast.Name(id="timedelta") | ast.Attribute(attr="timedelta"), args=args, keywords=keywords):
            try:
                return timedelta(*map(number, args), **{str(one.arg): number(one.value) for one in keywords})
            except (TypeError, OverflowError):
                raise NotLiteral from None
    raise NotLiteral


def _calculated(operator: ast.operator, left: float, right: float) -> float:
    match operator:
        case ast.Add():
            return _number(left + right)
        case ast.Sub():
            return _number(left - right)
        case ast.Mult():
            return _number(left * right)
    if right == 0:
        raise NotLiteral
    return _number(left / right)


def _number(value: object) -> float:
    # Bounded: a product of large numbers is not calculated.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > NUMBER_MAX:
        raise NotLiteral
    return value
