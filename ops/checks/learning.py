"""Checks of what a step computed: finite numbers, and trainer and engine that mean the same by the same weights."""

from __future__ import annotations

import statistics
from typing import Any

from furlong.ops.checks.verdict import SHOWN, Verdict, finite

CEILINGS = {"mismatch_mean": 0.05, "mismatch_p99": 0.5, "mismatch_k3": 0.02}
"""In nat. Runs here show a mean of 1e-7 (float32) to 6e-3 (experts in bfloat16) and a k3 below 1e-4; ten times the worst
of them is another model, another precision or another tokenisation, not rounding."""
GROWTH = 5.0
"""Times the median of the steps before, from which on mismatch is worth a look."""
NOISE = 1e-3
"""Nat; growth below it is rounding."""
WINDOW = 20
"""Steps before that a step is compared with."""
NUMBERS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "ess",
    "clip_fraction",
    "rejected_fraction",
    "mismatch_coverage",
)


def finite_loss(step: dict[str, Any]) -> Verdict:
    """Loss, gradient norm and the other numbers of the step are numbers."""
    bad = [name for name in NUMBERS if not finite(step[name])]
    found = {name: step[name] for name in NUMBERS if name not in bad}
    if not bad:
        return Verdict("finite_loss", True, True, found=found)
    words = (
        f"{', '.join(bad)} of the step is not a finite number; look at its rollouts, and lower algorithm.learning_rate"
    )
    return Verdict("finite_loss", False, True, words, found)


def mismatch_ceiling(step: dict[str, Any], worst: list[dict[str, Any]]) -> Verdict:
    """Trainer and engine give sampled tokens nearly the same log-probability under the weights that sampled them.

    Args:
        step: row of `steps`; one that trained on nothing measures nothing, and passes.
        worst: the tokens that differ most: trajectory_id, position, difference.
    """
    values = {name: step[name] for name in CEILINGS}
    if not step["tokens_trained"]:
        return Verdict("mismatch_ceiling", True, True, found={"tokens_trained": 0})
    high = [name for name, ceiling in CEILINGS.items() if not finite(values[name]) or values[name] > ceiling]
    if not high:
        return Verdict("mismatch_ceiling", True, True, found=values)
    told = ", ".join(f"{name} is {values[name]} where {CEILINGS[name]} is allowed" for name in high)
    tokens = "; ".join(
        f"{row['trajectory_id']} token {row['position']}: {row['difference']:+.3f}" for row in worst[:SHOWN]
    )
    words = f"{told}: engine and trainer compute different policies; see docs/parity.md. Worst tokens: {tokens or 'unknown'}"
    names = list(dict.fromkeys(row["trajectory_id"] for row in worst))
    return Verdict(
        "mismatch_ceiling", False, True, words, {k: v for k, v in values.items() if finite(v)}, names[:SHOWN]
    )


def mismatch_history(step: dict[str, Any], before: list[dict[str, Any]]) -> Verdict:
    """Mismatch does not grow against the steps before it; a warning.

    Args:
        before: rows of earlier steps, oldest first.
    """
    values = [row["mismatch_mean"] for row in before[-WINDOW:] if finite(row["mismatch_mean"])]
    now = step["mismatch_mean"]
    if len(values) < 3 or not step["tokens_trained"]:
        return Verdict("mismatch_history", True, False, found={"steps_before": len(values)})
    usual = statistics.median(values)
    found = {"mismatch_mean": now, "median_before": usual, "steps_before": len(values)}
    if finite(now) and now <= max(NOISE, GROWTH * usual):
        return Verdict("mismatch_history", True, False, found=found)
    words = f"mean mismatch is {now}, the median of {len(values)} steps before {usual:.3g}; docs/parity.md lists its sources"
    return Verdict("mismatch_history", False, False, words, found)
