"""Arithmetic on a text, exact where it can be, bounded in time and size."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

Number = int | Fraction

LONGEST = 1000
"""Characters of an expression."""
DEEPEST = 50
"""Operators and brackets within each other."""
MOST_BITS = 4096
"""Bits of a numerator or denominator on the way."""
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[0-9])")
"""Python refuses them; people write them."""


class CalculatorError(ValueError):
    """An expression without a value; the message is what the policy is told."""


def calculate(expression: str) -> str:
    """The value of + - * / // % ** and brackets over decimal numbers, as text.

    Division of whole numbers is exact until the end: `1/3*3` is 1. A value that is not whole is written with 12
    significant digits.

    Raises:
        CalculatorError: not arithmetic, too long, too deep, too large, or undefined.
    """
    if len(expression) > LONGEST:
        raise CalculatorError(f"an expression may have {LONGEST} characters, not {len(expression)}; shorten it")
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", expression.strip()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise CalculatorError("not an expression of numbers, + - * / // % ** and brackets; write it anew") from err
    return _written(_value(tree.body, 0))


def _value(node: ast.expr, depth: int) -> Number:
    if depth > DEEPEST:
        raise CalculatorError(f"operators may be nested {DEEPEST} deep; simplify the expression")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(_exact(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        try:
            return _bounded(_OPERATORS[type(node.op)](left, right))
        except ZeroDivisionError as err:
            raise CalculatorError("division by zero; correct the expression") from err
    raise CalculatorError("only numbers, + - * / // % ** and brackets are known; write it with those")


def _exact(value: int | float) -> Number:
    """The decimal number that was written, not the binary one next to it: 0.1 + 0.2 is 0.3."""
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise CalculatorError("a number is too large; use smaller ones")
    return Fraction(str(value))


def _divide(left: Number, right: Number) -> Number:
    return Fraction(left) / Fraction(right)


def _power(base: Number, exponent: Number) -> Number:
    exponent = Fraction(exponent)
    if exponent.denominator == 1:
        size = max(abs(Fraction(base).numerator).bit_length(), Fraction(base).denominator.bit_length())
        if size > 1 and size * abs(exponent) > MOST_BITS:
            raise CalculatorError("the power is too large; use smaller numbers")
        return Fraction(base) ** int(exponent)
    try:
        root = float(base) ** float(exponent)
    except OverflowError as err:
        raise CalculatorError("the power is too large; use smaller numbers") from err
    if isinstance(root, complex) or not math.isfinite(root):
        raise CalculatorError("the power has no real value; correct the expression")
    return Fraction(root)


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bounded(value: Number) -> Number:
    exact = Fraction(value)
    if max(exact.numerator.bit_length(), exact.denominator.bit_length()) > MOST_BITS:
        raise CalculatorError(f"a number grew beyond {MOST_BITS} bits; use smaller ones")
    return value


def _written(value: Number) -> str:
    exact = Fraction(value)
    if exact.denominator == 1:
        return str(exact.numerator)
    try:
        return f"{float(exact):.12g}"
    except OverflowError as err:
        raise CalculatorError("the value is too large; use smaller numbers") from err
