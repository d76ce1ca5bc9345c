"""Verifiers of numbers and of mathematical expressions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from furlong.ops.tasks.scoring import Judgement, is_negative

_NUMBER = re.compile(
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:(?<=[0-9])\.?|\.(?=[0-9]))[0-9]*(?:[eE][-+]?[0-9]+)?"
)
_LONGEST, _LONGEST_EXPONENT = 400, 300
"""Characters of a number, and its power of ten: a longer one is taken for a mistake, and would fill the memory."""


def numeric(reply: str, entry: dict[str, Any], answer: str) -> Judgement:
    """The last number of the reply must be within `entry["tolerance"]` of the answer.

    The tolerance (1e-6 unless given) is relative to the answer's size, and absolute when the answer is smaller than 1.
    """
    wanted = last_number(answer)
    if wanted is None:
        raise ValueError(f"the answer {answer!r} is no number; use another verifier for this task")
    tolerance = Fraction(str(entry.get("tolerance", 1e-6)))
    if tolerance < 0:
        raise ValueError(f"tolerance={float(tolerance)} is negative; set 0 or more")
    found = last_number(reply)
    if found is None:
        return Judgement(None, 0.0, "the reply holds no number")
    close = abs(found - wanted) <= tolerance * max(1, abs(wanted))
    return Judgement(f"{float(found):.12g}", float(close), "" if close else f"off by {float(abs(found - wanted)):.3g}")


def last_number(text: str) -> Fraction | None:
    """The last decimal number of `text`, exactly, or fraction such as 3/4; thousands commas and exponents are understood,
    signs as `scoring.extract_integer` does."""
    matches = [match for match in _NUMBER.finditer(text) if any(letter.isdigit() for letter in match.group())]
    if not matches:
        return None
    *earlier, last = matches
    over = earlier.pop() if earlier and text[earlier[-1].end() : last.start()] == "/" else None
    if over and earlier and text[earlier[-1].end() : over.start()] == "/":
        over = None  # a date or the like
    value, divisor = _value((over or last).group()), _value(last.group()) if over else Fraction(1)
    if value is None or not divisor or abs(value / divisor) > Fraction(10) ** _LONGEST_EXPONENT:
        return None
    return -value / divisor if is_negative(text[: (over or last).start()]) else value / divisor


def _value(number: str) -> Fraction | None:
    """None for one that is too long."""
    if len(number) > _LONGEST:
        return None
    mantissa, _, exponent = number.replace(",", "").lower().partition("e")
    if exponent and abs(int(exponent)) > _LONGEST_EXPONENT:
        return None
    return Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def math_verify(reply: str, entry: dict[str, Any], answer: str) -> Judgement:
    """The expression that math-verify takes for the reply's answer must equal the answer as it sees it: what is boxed goes
    before what follows words like "the answer is", and that before other expressions, LaTeX or plain, the last first.

    Its own time limits are off: they are alarms of the whole process, would disarm the worker's, and would turn a time-out
    into a wrong answer. The worker's deadline ends an expression that takes too long.
    """
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(
            f"math-verify finds no expression in the answer {answer!r}; use another verifier for this task"
        )
    try:
        found = parse(reply, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
        same = bool(found) and verify(gold, found, timeout_seconds=None, raise_on_error=True)
    except Exception as err:  # of a library that reads what a policy wrote: it may be anything, and blames the reply
        return Judgement(None, 0.0, f"math-verify cannot read the reply ({type(err).__name__}: {str(err)[:200]})")
    if not found:
        return Judgement(None, 0.0, "math-verify finds no expression in the reply")
    return Judgement(str(found[-1]), float(same))
