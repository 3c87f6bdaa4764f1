"""Values that stand in code: literals, sums and products of numbers, texts put together. Nothing is run."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from .parsed import Malformed

Value = str | int | float | bool | None | list["Value"] | tuple["Value", ...]
_LARGEST = 1e15
_NUMBERS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def constant(node: ast.expr) -> Value:
    """The value of a constant expression. Malformed for any other one, which it shows.

    >>> constant(ast.parse("1920 / 2 + 1", mode="eval").body)
    961.0
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return _bounded(node.value, node)
    if isinstance(node, ast.List):
        return [constant(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(constant(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _number(constant(node.operand), node)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _combined(node)
    raise Malformed(f"{shown(node)} is not a constant: write the value itself")


def _combined(node: ast.BinOp) -> Value:
    left, right = constant(node.left), constant(node.right)
    if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
        return left + right
    combine = _NUMBERS.get(type(node.op))
    if combine is None:
        raise Malformed(f"{shown(node)} is not a constant: of arithmetic there are + - * / //")
    try:
        return _bounded(combine(_number(left, node), _number(right, node)), node)
    except ZeroDivisionError:
        raise Malformed(f"{shown(node)} divides by zero") from None


def _number(value: Value, node: ast.expr) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"{shown(node)} calculates with {value!r}, which is no number")
    return value


def _bounded(value: str | float | bool | None, node: ast.expr) -> str | float | bool | None:
    # a product of products would else grow without bound, at the harness's cost
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= _LARGEST):
        raise Malformed(f"{shown(node)} is too large a number")
    return value


def shown(node: ast.AST) -> str:
    """The code as it was written, shortened."""
    text = ast.unparse(node)
    return text if len(text) <= 80 else text[:77] + "..."
