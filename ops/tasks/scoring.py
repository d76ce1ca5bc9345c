"""From a reply to a verdict. Pure: no clock, no process; `resources.verifier` adds the deadline."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import math
import re
from importlib.metadata import version
from typing import Any, NamedTuple

from furlong.ops.records import Verdict


class Judgement(NamedTuple):
    """What a verifier function says of one reply."""

    extracted: str | None
    """The answer found in the reply; None when there is none."""
    score: float
    """In [0, 1]; 1 is accepted."""
    detail: str = ""
    """One line for a person."""


def score_reply(item: dict[str, str]) -> dict[str, Any]:
    """Give {verdict, score, extracted, detail} for one reply.

    Rewards are all or nothing: reasoning-gym's partial credit measures overlap of strings, which would pay
    "12" half the reward of the answer "2".

    Args:
        item: a row of table `prompts` plus `reply` (text without the stop token) and `finish_reason`. `verifier` is
            "module:function"; the function takes (reply, the decoded `entry`) and returns a Judgement.
    Raises:
        ValueError: an unknown finish reason or verifier, or a score outside [0, 1]. Whatever the verifier raises.
    """
    if item["finish_reason"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {item['finish_reason']!r} is not stop, length or abort; mend the engine")
    if item["finish_reason"] != "stop":
        return _verdict(Verdict.TRUNCATED, 0.0, "", f"the reply did not end by itself ({item['finish_reason']})")
    found = resolve(item["verifier"])(item["reply"], json.loads(item["entry"]))
    if found.extracted is None:
        return _verdict(Verdict.UNPARSABLE, 0.0, "", found.detail or "no answer found in the reply")
    if not (isinstance(found.score, int | float) and math.isfinite(found.score) and 0 <= found.score <= 1):
        raise ValueError(f"{item['verifier']} gave the score {found.score!r}; it must return a number in [0, 1]")
    accepted = found.score == 1
    return _verdict(Verdict.CORRECT if accepted else Verdict.INCORRECT, float(accepted), found.extracted, found.detail)


def resolve(verifier: str) -> Any:
    """The function a verifier's name "module:function" stands for."""
    module, _, name = verifier.partition(":")
    function = getattr(importlib.import_module(module), name, None) if name else None
    if function is None:
        raise ValueError(f"verifier {verifier!r} is not the name of a function; write it as module:function")
    return function


def verifier_version(verifier: str) -> str:
    """16 hex digits that change with the source of the verifier's module or the version of reasoning-gym."""
    source = inspect.getsource(inspect.getmodule(resolve(verifier)))
    return hashlib.blake2b(f"{source}\0{version('reasoning-gym')}".encode(), digest_size=8).hexdigest()


def exact(reply: str, entry: dict[str, Any]) -> Judgement:
    """The reply, without white space around it, must be the answer itself."""
    text = reply.strip()
    return Judgement(text or None, float(text == entry["answer"]))


def last_integer(reply: str, entry: dict[str, Any]) -> Judgement:
    """The last number of the reply must be an integer, and reasoning-gym must accept it."""
    number = extract_integer(reply)
    return Judgement(None, 0.0, "the reply does not end in an integer") if number is None else _gym(number, entry)


def whole_reply(reply: str, entry: dict[str, Any]) -> Judgement:
    """reasoning-gym must accept the whole reply, without white space around it."""
    text = reply.strip()
    return _gym(text, entry) if text else Judgement(None, 0.0)


_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(\.[0-9]+)?")


def extract_integer(text: str) -> str | None:
    """The last number of `text` in canonical form ("-7"; no leading zeros, no thousands commas).

    None when there is no number or the last one has decimals. A minus (also U+2212) is a sign when it touches the
    number, touches no letter or digit on its left, and does not follow an operand: "3-5" and "3 -5" end in 5,
    "3-5=-2", "is -2", "3 - -2" and "(-2)" in -2.
    """
    matches = list(_NUMBER.finditer(text))
    if not matches or matches[-1].group(1):
        return None
    digits = matches[-1].group().replace(",", "").lstrip("0") or "0"
    before = text[: matches[-1].start()]
    if before[-1:] not in ("-", "\u2212") or digits == "0":
        return digits
    operand = before[:-1]
    is_difference = operand[-1:].isalnum() or operand.rstrip()[-1:].isdigit() or operand.rstrip().endswith(")")
    return digits if is_difference else f"-{digits}"


def _gym(answer: str, entry: dict[str, Any]) -> Judgement:
    dataset = _dataset(entry["dataset"], json.dumps(entry["options"], sort_keys=True))
    score = float(dataset.score_answer(answer, entry["item"]))
    return Judgement(answer, score, "" if score in (0.0, 1.0) else f"reasoning-gym's own score: {score:.4g}")


@functools.cache
def _dataset(name: str, options: str) -> Any:
    from furlong.ops.tasks.families import open_dataset

    return open_dataset(name, json.loads(options))


def _verdict(verdict: Verdict, score: float, extracted: str, detail: str) -> dict[str, Any]:
    return {"verdict": verdict.value, "score": score, "extracted": extracted, "detail": detail}
