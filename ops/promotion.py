"""Whether a weights version may be called `stable` or `candidate`: decided from rows, and from nothing that is missing."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

from furlong.ops.stages.checks import CHECKS

NAMES = ("stable", "candidate")
NOISE = 1.96
"""Standard errors of the paired difference of two evaluations that count as noise: a two-sided 95% interval."""


class PromotionError(ValueError):
    """A version that may not be promoted, or nothing to roll back to; the message says why and what to do."""


def failing_checks(checks: list[dict[str, Any]]) -> list[str]:
    """Why a step's rows of `checks` do not let its version be promoted, one that is missing included; empty when they do."""
    blocking = [row for row in checks if row["blocking"]]
    due = {name for name, (blocks, _) in CHECKS.items() if blocks}
    missing = ", ".join(sorted(due - {row["check"] for row in blocking}))
    said = [f"its step was never checked for {missing}; run the step's train_step again"] if missing else []
    return said + [
        f"check {row['check']} did not pass: {row['message'] or 'see its row in checks'}"
        for row in sorted(blocking, key=lambda row: row["check"])
        if not row["passed"]
    ]


def worse_evals(mine: list[dict[str, Any]], stable: list[dict[str, Any]]) -> list[str]:
    """Why rows of `evals` show a version to be worse than the stable one beyond noise; empty when they don't.

    The same questions are compared one by one, which leaves out how hard each is. Without a stable version (no rows) it is
    enough that the version was evaluated.
    """
    if not mine:
        return ["it was not evaluated; run the job `evaluate` for it first"]
    said = []
    for mode in sorted({row["mode"] for row in stable}):
        ours, theirs = _accuracy(mine, mode), _accuracy(stable, mode)
        if not all(map(math.isfinite, [*ours.values(), *theirs.values()])):
            said.append(
                f"its {mode} evaluation, or the stable version's, has a question without a reply; evaluate both"
            )
            continue
        if ours.keys() != theirs.keys() or len(ours) < 2:
            said.append(f"its {mode} evaluation covers other questions than the stable version's; evaluate both")
            continue
        changes = [ours[prompt] - theirs[prompt] for prompt in sorted(ours)]
        change, error = fmean(changes), stdev(changes) / math.sqrt(len(changes))
        if not change + NOISE * error >= 0:
            noise = f"beyond noise (+-{NOISE * error:.3f})"
            said.append(f"its {mode} accuracy is {-change:.3f} below the stable version's, {noise}")
    return said


def _accuracy(rows: list[dict[str, Any]], mode: str) -> dict[str, float]:
    found = {}
    for row in rows:
        if row["mode"] == mode:
            found[row["prompt_id"]] = row["correct"] / row["samples"] if row["samples"] else math.nan
    return found


def previous_version(history: list[dict[str, Any]], tag: str) -> int:
    """What a tag named before its newest version, going back past earlier rollbacks.

    Raises:
        PromotionError: it never named another one.
    """
    names: list[int] = []
    for row in sorted(history, key=lambda row: row["seq"]):
        if row["tag"] != tag:
            continue
        if row["action"] == "rollback" and len(names) > 1:
            names.pop()
        else:
            names.append(row["version"])
    if len(names) < 2:
        raise PromotionError(
            f"{tag} never named another version, so there is nothing to roll back to; promote one first"
        )
    return names[-2]
