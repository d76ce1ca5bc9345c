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
    """In [0, 1]."""
    detail: str = ""
    """One line for a person."""
    accepted: bool | None = None
    """None for all or nothing: a score of 1 is accepted, and any other counts as 0. Otherwise the score counts as it is,
    and this says whether the verdict is `correct` or `incorrect`."""


def score_reply(item: dict[str, str]) -> dict[str, Any]:
    """Give {verdict, score, extracted, detail} for one reply.

    The verifiers of this module are all or nothing: reasoning-gym's partial credit measures overlap of strings, which
    would pay "12" half the reward of the answer "2".

    Args:
        item: a row of table `prompts` plus `reply` (text without the stop token), `finish_reason` and, where there are
            any, `messages` (the whole conversation as JSON). `verifier` is "module:function"; see `judge`.
    Raises:
        ValueError: an unknown finish reason or verifier, or a score outside [0, 1]. Whatever the verifier raises.
    """
    if item["finish_reason"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {item['finish_reason']!r} is not stop, length or abort; mend the engine")
    if item["finish_reason"] != "stop":
        return _verdict(Verdict.TRUNCATED, 0.0, "", f"the reply did not end by itself ({item['finish_reason']})")
    found = judge(item["verifier"], item, json.loads(item["entry"]))
    if found.extracted is None:
        return _verdict(Verdict.UNPARSABLE, 0.0, "", found.detail or "no answer found in the reply")
    accepted, score = counted(found)
    return _verdict(Verdict.CORRECT if accepted else Verdict.INCORRECT, score, found.extracted, found.detail)


def counted(found: Judgement) -> tuple[bool, float]:
    """Whether a verifier accepted the reply, and the score that counts."""
    if found.extracted is None:
        return False, 0.0
    if found.accepted is None:
        return found.score == 1, float(found.score == 1)
    return found.accepted, float(found.score)


def judge(verifier: str, item: dict[str, str], entry: dict[str, Any]) -> Judgement:
    """What a verifier says of a reply. Verifiers that combine others call this for each.

    The function takes (reply, the decoded `entry`) and, by name, as many of `question`, `answer` and `messages` (the
    decoded conversation, the reply included) as it wants, or `item` for all there is.

    Raises:
        ValueError: an unknown verifier, or a score outside [0, 1]. Whatever the verifier raises.
    """
    function = resolve(verifier)
    offered = {"item": item, "question": item.get("question", ""), "answer": item.get("answer", "")}
    wanted = inspect.signature(function).parameters.keys()
    if "messages" in wanted:
        offered["messages"] = json.loads(item.get("messages") or "[]")
    found = function(item["reply"], entry, **{name: value for name, value in offered.items() if name in wanted})
    if not (isinstance(found.score, int | float) and math.isfinite(found.score) and 0 <= found.score <= 1):
        raise ValueError(f"{verifier} gave the score {found.score!r}; it must return a number in [0, 1]")
    return found


_MODULE = re.compile(r'"verifier": *"([\w.]+):')


def modules(item: dict[str, str]) -> frozenset[str]:
    """Modules of all verifiers that scoring this item takes, those wrapped by others included."""
    return frozenset([item["verifier"].partition(":")[0], *_MODULE.findall(item["entry"])])


def resolve(verifier: str) -> Any:
    """The function a verifier's name "module:function" stands for."""
    module, _, name = verifier.partition(":")
    function = getattr(importlib.import_module(module), name, None) if name else None
    if function is None:
        raise ValueError(f"verifier {verifier!r} is not the name of a function; write it as module:function")
    return function


def verifier_version(verifier: str) -> str:
    """16 hex digits that change with the source of the verifier's module and the versions of the libraries that judge."""
    source = inspect.getsource(inspect.getmodule(resolve(verifier)))
    libraries = "\0".join(version(name) for name in ("reasoning-gym", "math-verify"))
    return hashlib.blake2b(f"{source}\0{libraries}".encode(), digest_size=8).hexdigest()


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
    return f"-{digits}" if digits != "0" and is_negative(text[: matches[-1].start()]) else digits


def is_negative(before: str) -> bool:
    """Whether the text before a number ends in its sign; see `extract_integer`."""
    if before[-1:] not in ("-", "\u2212"):
        return False
    operand = before[:-1]
    return not (operand[-1:].isalnum() or operand.rstrip()[-1:].isdigit() or operand.rstrip().endswith(")"))


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
