"""Task families: a family is a stream of question entries, reproducible from a seed, and the name of its verifier."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from furlong.ops.envs import verifiers_env
from furlong.ops.identity import counter_seed
from furlong.ops.spec import SpecError, TaskSpec
from furlong.ops.tasks.shaping import shaped, split

FAMILIES_VERSION = 1
"""Raised when the same options and seed give other questions; part of a dataset's fingerprint."""

LAST_INTEGER = "furlong.ops.tasks.scoring:last_integer"
WHOLE_REPLY = "furlong.ops.tasks.scoring:whole_reply"
EXACT = "furlong.ops.tasks.scoring:exact"

LONG_ARITHMETIC = "long_arithmetic"
SIGNS = {"+": "+", "-": "-", "x": "*"}
"""Operators as questions of `long_arithmetic` write them, and as a calculator knows them."""


def generator_version() -> str:
    """Versions of everything that decides which questions a seed gives."""
    return f"families {FAMILIES_VERSION}, reasoning_gym {version('reasoning-gym')}"


def entries(task: TaskSpec, seed: int) -> Iterator[dict[str, Any]]:
    """Endless entries {question, answer, verifier, entry} of a family; questions recur when it is a small one.

    Raises:
        SpecError: no such family, or options it refuses; the message names both.
    """
    task, rewards = split(task)
    return (shaped(row, rewards) for row in _rows(task, seed))


def _rows(task: TaskSpec, seed: int) -> Iterator[dict[str, Any]]:
    if task.name == "sort_digits":
        return _sort_digits(task, seed)
    if task.name == LONG_ARITHMETIC:
        return _long_arithmetic(task, seed)
    if task.name == "verifiers":
        return verifiers_env.rows(task)
    return _reasoning_gym(task, seed)


def open_dataset(name: str, options: dict[str, Any], seed: int = 0) -> Any:
    """The reasoning-gym dataset `name`, endless for all purposes; SpecError when it or an option is unknown."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=2**31 - 1, **options)
    except (ValueError, TypeError, AssertionError) as err:  # its configs check themselves with assert
        raise SpecError(
            f"data.tasks: reasoning-gym refuses {name!r} with options {options} ({err}); "
            f"set a dataset name and options that it knows, `sort_digits` or `{LONG_ARITHMETIC}`"
        ) from err


def _reasoning_gym(task: TaskSpec, seed: int) -> Iterator[dict[str, Any]]:
    dataset = open_dataset(task.name, task.options, counter_seed("family", seed, task.name) % 2**31)
    return (_gym_entry(task, dataset[index]) for index in itertools.count())


def _gym_entry(task: TaskSpec, item: dict[str, Any]) -> dict[str, Any]:
    answer = str(item["answer"])
    return {
        "question": item["question"],
        "answer": answer,
        "verifier": LAST_INTEGER if re.fullmatch(r"-?[0-9]+", answer) else WHOLE_REPLY,
        "entry": {"dataset": task.name, "options": task.options, "item": item},
    }


def _sort_digits(task: TaskSpec, seed: int) -> Iterator[dict[str, Any]]:
    low, high = _digits(task, 3, 6)
    rng = random.Random(counter_seed("family", seed, task.name))
    return (_digits_entry(rng, low, high) for _ in itertools.count())


def _long_arithmetic(task: TaskSpec, seed: int) -> Iterator[dict[str, Any]]:
    low, high = _digits(task, 2, 3)
    rng = random.Random(counter_seed("family", seed, task.name))
    return (_arithmetic_entry(rng, low, high) for _ in itertools.count())


def _digits(task: TaskSpec, low: int, high: int) -> tuple[int, int]:
    options = {"min_digits": low, "max_digits": high, **task.options}
    low, high = options["min_digits"], options["max_digits"]
    if set(options) != {"min_digits", "max_digits"} or not all(type(n) is int for n in (low, high)):
        raise SpecError(f"data.tasks: {task.name} takes the integers min_digits and max_digits, not {task.options}")
    if not 1 <= low <= high:
        raise SpecError(f"data.tasks: {task.name} needs 1 <= min_digits <= max_digits, not {low} and {high}; set both")
    return low, high


def _digits_entry(rng: random.Random, low: int, high: int) -> dict[str, Any]:
    digits = [rng.choice("0123456789") for _ in range(rng.randint(low, high))]
    answer = "".join(sorted(digits))
    return {"question": "".join(digits) + ">", "answer": answer, "verifier": EXACT, "entry": {"answer": answer}}


def _arithmetic_entry(rng: random.Random, low: int, high: int) -> dict[str, Any]:
    """Two numbers of so many digits and a sign between them; `expression` is what a calculator should be asked."""
    left, right = (
        rng.randrange(10 ** (digits - 1), 10**digits) for digits in (rng.randint(low, high), rng.randint(low, high))
    )
    sign = rng.choice(list(SIGNS))
    answer = {"+": left + right, "-": left - right, "x": left * right}[sign]
    entry = {"answer": str(answer), "expression": f"{left}{SIGNS[sign]}{right}"}
    return {"question": f"{left}{sign}{right}", "answer": str(answer), "verifier": EXACT, "entry": entry}
