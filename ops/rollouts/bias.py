"""Whether batches favoured short replies: what a researcher looks at before trusting an asynchronous run."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pyarrow as pa


def length_bias(batches: pa.Table, groups: pa.Table, trajectories: pa.Table) -> dict[str, Any]:
    """How the lengths of groups relate to when, and whether, they were trained on. Lengths are sampled tokens per
    trajectory, those that leaves share in the first only, means over a group's trajectories first; an entry is None where
    there is nothing to compute it from.

    Displacement of a group is how many batches later (negative: earlier) it was trained than in strict order of
    position. Where length did not matter, correlation and differences scatter around 0.

    Args:
        batches: columns step, attempt, groups, passed_over, waiting_groups, waiting_tokens; one attempt per step.
        groups: columns group_id, position.
        trajectories: columns group_id, loss_mask.
    Returns:
        groups: number in batches.
        tokens_admitted: their mean length.
        tokens_left: mean length of groups with trajectories that no batch has: rejected, or waiting still.
        tokens_waiting: mean length of groups that were finished, but left to a later batch or rejection, at each step.
        passed_over: unfinished groups that were overtaken, mean per batch.
        displacement_max: the largest displacement, in batches.
        tokens_overtaken: mean length of groups trained later than in strict order; tokens_on_time of all others.
        correlation: Pearson's, of displacement and length.
    """
    length = _lengths(trajectories)
    position = dict(zip(groups["group_id"].to_pylist(), groups["position"].to_pylist(), strict=True))
    rows = sorted(batches.to_pylist(), key=lambda row: row["step"])
    order = [(number, group["group_id"]) for number, row in enumerate(rows) for group in row["groups"]]
    strict = sorted((name for _, name in order), key=lambda name: position[name])
    sizes = [len(row["groups"]) for row in rows]
    due = dict(zip(strict, (number for number, size in enumerate(sizes) for _ in range(size)), strict=True))
    late = {name: number - due[name] for number, name in order}
    waited = [(row["waiting_groups"], row["waiting_tokens"]) for row in rows if row["waiting_groups"]]
    return {
        "groups": len(order),
        "tokens_admitted": _mean([length[name] for name in late]),
        "tokens_left": _mean([tokens for name, tokens in length.items() if name not in late]),
        "tokens_waiting": _ratio(sum(n * tokens for n, tokens in waited), sum(n for n, _ in waited)),
        "passed_over": _mean([row["passed_over"] for row in rows]),
        "displacement_max": max(late.values(), default=None),
        "tokens_overtaken": _mean([length[name] for name, by in late.items() if by > 0]),
        "tokens_on_time": _mean([length[name] for name, by in late.items() if by <= 0]),
        "correlation": _pearson([(by, length[name]) for name, by in late.items()]),
    }


def _lengths(trajectories: pa.Table) -> dict[str, float]:
    found: dict[str, list[int]] = defaultdict(list)
    for row in trajectories.select(["group_id", "loss_mask"]).to_pylist():
        found[row["group_id"]].append(sum(row["loss_mask"]))
    return {name: sum(tokens) / len(tokens) for name, tokens in found.items()}


def _mean(values: list[float]) -> float | None:
    return _ratio(sum(values), len(values))


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None


def _pearson(pairs: list[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    dx = [x - sum(xs) / len(xs) for x in xs]
    dy = [y - sum(ys) / len(ys) for y in ys]
    spread = math.sqrt(sum(x * x for x in dx) * sum(y * y for y in dy))
    return sum(x * y for x, y in zip(dx, dy, strict=True)) / spread if spread else None
