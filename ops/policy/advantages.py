"""Group-relative advantages: a reward counts by how it compares with the other replies to the same prompt.

Pure numpy: the stage that records a step's outcomes has no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from furlong.ops.records import Disposition

STD_FLOOR = 1e-6
"""Added to a group's population standard deviation, as GRPO's implementations do; it only keeps the division defined."""


@dataclass(frozen=True)
class Outcome:
    """What one trajectory brings to the step."""

    reward: float | None
    """The verifier's score; None when it gave none."""
    advantage: float
    """0 exactly when `disposition` is not `trained`, or when the reward is its group's mean."""
    disposition: Disposition
    """Whether the trajectory's tokens enter the loss, and if not, why."""


def group_advantages(rewards: list[float | None], groups: list[str], normalise_std: bool) -> list[Outcome]:
    """Reward minus its group's mean, optionally divided by the group's standard deviation.

    Follows GRPO (Shao et al. 2024, "DeepSeekMath", eq. in section 4.1.2: A_i = (r_i - mean r) / std r) and, with
    `normalise_std` off, Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training"). The standard deviation is
    that of the population (divisor n). An unscored trajectory is left out of its group's mean and deviation.

    Args:
        rewards: one score per trajectory, finite, or None where the verifier gave none.
        groups: the group id of each trajectory; a group's trajectories need not stand together.
        normalise_std: divide by the standard deviation + STD_FLOOR.
    Returns:
        one Outcome per trajectory, in the given order. A group whose scored rewards are all equal (so also a group
        with one scored trajectory) gives `zero_variance`: no comparison, no gradient.
    Raises:
        ValueError: lists of different lengths, or a reward that is NaN or infinite.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards but {len(groups)} group ids; give one of each per trajectory")
    scored: dict[str, list[float]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise ValueError(
                f"reward {index} (group {group}) is {reward}; a verifier without a score must give None, not a number"
            )
        scored.setdefault(group, []).append(float(reward))
    centre = {group: float(np.mean(values)) for group, values in scored.items()}
    spread = {group: float(np.std(values)) for group, values in scored.items()}
    equal = {group for group, values in scored.items() if min(values) == max(values)}

    def outcome(reward: float | None, group: str) -> Outcome:
        if reward is None:
            return Outcome(None, 0.0, Disposition.UNSCORED)
        if group in equal:
            return Outcome(float(reward), 0.0, Disposition.ZERO_VARIANCE)
        scale = spread[group] + STD_FLOOR if normalise_std else 1.0
        return Outcome(float(reward), (float(reward) - centre[group]) / scale, Disposition.TRAINED)

    return [outcome(reward, group) for reward, group in zip(rewards, groups, strict=True)]
