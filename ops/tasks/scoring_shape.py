"""Verifiers made of other verifiers: by length, by form, and several at once.

What they wrap stands in their `entry` as {"verifier": "module:function", "entry": {...}}, so that they nest.
"""

from __future__ import annotations

import math
import re
from typing import Any

from furlong.ops.tasks.scoring import Judgement, counted, judge


def length_shaped(reply: str, entry: dict[str, Any], item: dict[str, str]) -> Judgement:
    """The score of `entry["of"]`, whole up to `free` characters of reply, falling in a line to nothing at `limit`."""
    free, limit = entry["free"], entry["limit"]
    if not 0 <= free < limit:
        raise ValueError(f"free={free} and limit={limit}: set 0 <= reward.free < reward.limit, in characters")
    found = _inner(entry["of"], item)
    accepted, score = counted(found)
    share = min(1.0, max(0.0, (limit - len(reply)) / (limit - free)))
    return Judgement(found.extracted, score * share, _joined(found.detail, f"length {share:.3g}"), accepted)


def format_shaped(reply: str, entry: dict[str, Any], item: dict[str, str]) -> Judgement:
    """The score of `entry["of"]`, times `otherwise` (0 unless given) when the reply as a whole is not of the form `pattern`.

    A group called `answer` in the pattern is what `of` gets to see; without a match there is then no answer.
    """
    pattern = re.compile(entry["pattern"], re.DOTALL)
    otherwise = entry.get("otherwise", 0.0)
    if not 0 <= otherwise <= 1:
        raise ValueError(f"otherwise={otherwise}: set reward.otherwise to a share in [0, 1]")
    match = pattern.fullmatch(reply.strip())
    if "answer" in pattern.groupindex:
        if match is None:
            return Judgement(None, 0.0, "the reply is not of the form asked for")
        item = {**item, "reply": match["answer"] or ""}
    found = _inner(entry["of"], item)
    accepted, score = counted(found)
    if match:
        return Judgement(found.extracted, score, found.detail, accepted)
    return Judgement(found.extracted, score * otherwise, _joined(found.detail, "not of the form asked for"), False)


def composite(reply: str, entry: dict[str, Any], item: dict[str, str]) -> Judgement:
    """The mean of `entry["parts"]` by their `weight`; accepted when every part with a weight accepts.

    A part that finds no answer counts as 0; when none finds one, the reply has none.
    """
    parts = entry["parts"]
    weights = [part["weight"] for part in parts]
    total = math.fsum(weights)
    if not (all(weight >= 0 for weight in weights) and 0 < total < math.inf):
        raise ValueError(f"weights {weights}: set numbers of at least 0, one of them more")
    found = [_inner(part, item) for part in parts]
    extracted = next((one.extracted for one in found if one.extracted is not None), None)
    results = [counted(one) for one in found]
    score = math.fsum(w * s for w, (_, s) in zip(weights, results, strict=True)) / total
    accepted = all(yes for w, (yes, _) in zip(weights, results, strict=True) if w > 0)
    names = [part["verifier"].partition(":")[2] for part in parts]
    shown = ", ".join(f"{name} {s:.3g}" for name, (_, s) in zip(names, results, strict=True))
    return Judgement(extracted, min(1.0, score), shown, accepted)


def _inner(of: dict[str, Any], item: dict[str, str]) -> Judgement:
    return judge(of["verifier"], item, of["entry"])


def _joined(*lines: str) -> str:
    return "; ".join(line for line in lines if line)
