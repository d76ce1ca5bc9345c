"""Arithmetic: exact against fractions, and bounded against what a policy might write."""

import random
import time
from fractions import Fraction

import pytest

from furlong.ops.envs.calculator import CalculatorError, calculate


def _reference(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression and its value, built side by side."""
    if depth == 0 or rng.random() < 0.2:
        whole, part = rng.randrange(1000), rng.randrange(100)
        return rng.choice([(str(whole), Fraction(whole)), (f"{whole}.{part:02}", whole + Fraction(part, 100))])
    (one, left), (two, right) = _reference(rng, depth - 1), _reference(rng, depth - 1)
    sign = rng.choice("+-*/") if right else "+"
    value = {"+": left + right, "-": left - right, "*": left * right, "/": left / right if right else None}[sign]
    return f"({one} {sign} {two})", value


def test_random_expressions_have_their_exact_value():
    rng = random.Random(0)
    whole = 0
    for _ in range(500):
        text, value = _reference(rng, 3)
        whole += value.denominator == 1
        assert calculate(text) == (str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}")
    assert whole > 50


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*7", "84"), ("1/3*3", "1"), ("0.1+0.2", "0.3"), ("2**10", "1024"), ("2**-2", "0.25"), ("-7//2", "-4"),
        ("-7%3", "2"), ("06+007", "13"), ("00.5*2", "1"), ("10.05", "10.05"), ("+-3", "-3"), (" (1) ", "1"),
        ("2**0.5", "1.41421356237"), ("0*(1-1)", "0"), ("1e3", "1000"), ("100", "100"),
    ],
)  # fmt: skip
def test_forms(text: str, value: str):
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an expression"), ("12*", "not an expression"), ("a", "only numbers"), ("True", "only numbers"),
        ("1j", "only numbers"), ("'1'", "only numbers"), ("__import__('os')", "only numbers"), ("1 if 1 else 2", "only"),
        ("[1]*9", "only numbers"), ("1<2", "only numbers"), ("1/0", "division by zero"), ("0**-1", "division by zero"),
        ("5%0", "division by zero"), ("9**9**9", "too large"), ("2**99999", "too large"), ("1e400", "too large"),
        ("(-8)**0.5", "no real value"), ("9" * 1001, "1000 characters"), ("-" * 60 + "1", "nested 50 deep"),
        ("(" * 400 + "1" + ")" * 400, "not an expression"), ("9" * 999 + "*" + "9", "1000 characters"),
        ("9**400*9**400*9**400*9**400", "beyond 4096 bits"), ("(10**900)**1.5", "too large"), ("\x00", "not an expression"),
    ],
)  # fmt: skip
def test_what_has_no_value_says_why(text: str, says: str):
    begin = time.monotonic()
    with pytest.raises(CalculatorError, match=says):
        calculate(text)
    assert time.monotonic() - begin < 1.0


def test_hostile_texts_are_refused_quickly():
    rng = random.Random(1)
    begin = time.monotonic()
    for _ in range(2000):
        text = "".join(rng.choice("0123456789+-*/%()._e x\n#'") for _ in range(rng.randrange(1, 60)))
        try:
            assert calculate(text)
        except CalculatorError:
            continue
    assert time.monotonic() - begin < 10.0
