"""Every small break that a module offers: one changed token, or one statement left out.

A break edits the text of the source, so that the rest of the file, and every line number, stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
# The statements that are left out, one at a time, inside functions: without a name of a class or module nothing starts.
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Break:
    """Put `new` in the place of the characters from `start` to `end`."""

    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def __str__(self) -> str:
        return f"{self.old.strip()}  ->  {self.new.strip()}"


class Source:
    """A text, its tree, and where in the text a node of the tree is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the place of a column, which `ast` counts in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self.offset(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)

    def replaced(self, node: ast.expr | ast.stmt, new: str) -> Break:
        start, end = self.start(node), self.end(node)
        return Break(node.lineno, start, end, self.text[start:end], new)

    def swapped(self, left: ast.expr, right: ast.expr, tokens: tuple[str, str]) -> Iterator[Break]:
        """Exchange the operator between two operands; parentheses and comments between them are left alone."""
        old, new = tokens
        begin, gap = self.end(left), self.text[self.end(left) : self.start(right)]
        if gap.count(old) == 1 and "#" not in gap:
            start = begin + gap.index(old)
            yield Break(left.end_lineno or left.lineno, start, start + len(old), old, new)


def breaks(text: str) -> list[Break]:
    """Return every break of this source, in the order of the text."""
    source = Source(text)
    running = list(_run_time(source.tree))
    found = [broken for node in running for broken in _of(node, source)]
    for function in (node for node in running if isinstance(node, FUNCTIONS)):
        statements = (node for node in _run_time(function) if isinstance(node, DROPPED) and not _is_docstring(node))
        found += [source.replaced(statement, "pass") for statement in statements]
    return sorted(set(found), key=lambda broken: (broken.start, broken.new))


def _run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs: no annotations, no docstrings, nothing under `if TYPE_CHECKING`."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases", "keywords") and isinstance(
            tree, (ast.arg, ast.AnnAssign, ast.ClassDef, *FUNCTIONS)
        ):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not _is_for_types(node):
                yield node
                yield from _run_time(node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _of(node: ast.AST, source: Source) -> Iterator[Break]:
    match node:
        case ast.Compare():
            for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
                yield from source.swapped(left, right, COMPARISONS[type(operator)])
        case ast.BoolOp():
            tokens = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                yield from source.swapped(left, right, tokens)
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield from source.swapped(node.left, node.right, ARITHMETIC[type(node.op)])
        case ast.UnaryOp(op=ast.Not()):
            yield source.replaced(node, f"({ast.unparse(node.operand)})")
        case ast.If() | ast.While() | ast.IfExp():
            yield source.replaced(node.test, f"(not ({ast.unparse(node.test)}))")
        case ast.Constant():
            yield from _of_constant(node, source)
        case ast.Return() if node.value is not None and not _is_none(node.value):
            yield source.replaced(node, "return None")


def _of_constant(node: ast.Constant, source: Source) -> Iterator[Break]:
    match node.value:
        case bool():
            yield source.replaced(node, str(not node.value))
        case int() | float():
            yield source.replaced(node, repr(node.value + 1))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
