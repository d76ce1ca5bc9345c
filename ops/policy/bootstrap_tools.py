"""Demonstrations of conversations with a calculator, for a policy made from nothing.

What they get wrong on purpose is what RL then removes: a digit or the sign of the call, answering without a call, a
digit of the answer that was handed over.
"""

from __future__ import annotations

import json
import random
import string
from typing import Any

from furlong.ops.envs.calculator import calculate
from furlong.ops.spec import DataSpec, SpecError
from furlong.ops.tasks.families import SIGNS

ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
BEFORE_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
AFTER_CALL = '"}}</tool_call>'
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Everything that the calculator may answer."""

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

Turn = tuple[list[str], list[str]]
"""Tokens that are given, and the reply to them, without its end."""


def check_tools(data: DataSpec, rows: list[dict[str, Any]]) -> None:
    """Raise SpecError unless every question tells what to ask a calculator, and the policy may ask one."""
    if "calculator" not in str(data.env.options.get("tools", "calculator")).split(","):
        raise SpecError("a scratch model with `env: tools` is taught the calculator; name it in data.env.options.tools")
    odd = [row for row in rows if "expression" not in json.loads(row["entry"])]
    if odd:
        raise SpecError(
            f"a scratch model with `env: tools` is taught on long_arithmetic, not on {odd[0]['task']}; set data.tasks"
        )
    text = data.system + "".join(row["question"] for row in rows)
    if strange := sorted(set(text) - set(ALPHABET)):
        raise SpecError(f"a scratch model with `env: tools` knows no {strange[0]!r}; write data.system in ASCII")


def converse(system: str, row: dict[str, Any], noise: float, rng: random.Random) -> list[Turn]:
    """One conversation about a question: a call and an answer, or the answer at once."""
    given = ["<system>", *system, "<end>"] if system else []
    given += ["<user>", *row["question"], "<end>", "<assistant>"]
    expression = json.loads(row["entry"])["expression"]
    fault = rng.choice(("digit", "sign", "no call", "copy")) if rng.random() < noise else ""
    if fault == "no call":
        return [(given, [_other(digit, string.digits, rng) for digit in row["answer"]])]
    if fault == "digit":
        expression = _misspell(expression, string.digits, rng)
    if fault == "sign":
        expression = _misspell(expression, "".join(SIGNS.values()), rng)
    result = calculate(expression)
    answer = _misspell(result, string.digits, rng) if fault == "copy" else result
    call = [BEFORE_CALL, *expression, AFTER_CALL]
    return [(given, call), (["<tool>", *result, "<end>", "<assistant>"], list(answer))]


def _misspell(text: str, letters: str, rng: random.Random) -> str:
    """`text` with one of those of its characters that are among `letters` replaced by another of them."""
    place = rng.choice([index for index, letter in enumerate(text) if letter in letters])
    return text[:place] + _other(text[place], letters, rng) + text[place + 1 :]


def _other(letter: str, letters: str, rng: random.Random) -> str:
    return rng.choice([other for other in letters if other != letter])
