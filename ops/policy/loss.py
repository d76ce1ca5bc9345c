"""The losses of one step's tokens, as the literal formulas; all sums run over trained tokens only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class NonFiniteError(ValueError):
    """A number that must be finite is not; the message names the trajectories or tensors."""


def token_denominators(lengths: list[int], mean: str) -> list[float]:
    """n_t of each trajectory's tokens, given how many of its tokens are trained, over the trained trajectories of a step.

    `sequence`: N * length, i.e. the mean of a trajectory's tokens, then over the N trajectories that have any
    (Shao et al. 2024, "DeepSeekMath", eq. 3, save that groups without variance, whose advantage is 0, are left out of N
    rather than dilute it). `token`: all trained tokens, each with the same share (Yu et al. 2025,
    "DAPO", eq. 8).
    """
    if mean == "token":
        return [float(sum(lengths))] * len(lengths)
    trained = sum(length > 0 for length in lengths)
    return [float(trained * length) for length in lengths]


def constant_denominators(lengths: list[int], longest: int) -> list[float]:
    """n_t = N * longest for every token, N the trajectories with trained tokens: a token's weight does not depend on how
    long its reply, or any other, came out (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2, "Dr. GRPO",
    whose code divides by the generation budget `longest`)."""
    trained = sum(length > 0 for length in lengths)
    return [float(trained * longest)] * len(lengths)


def clipped_loss(
    log_ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"], clip_low: float, clip_high: float
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) with r_t = exp(log_ratio_t).

    PPO's clipped objective (Schulman et al. 2017, eq. 7) with a clip per side (Yu et al. 2025, "DAPO", eq. 8).

    Returns:
        each token's loss, before any mean; and which tokens had their ratio clipped (and give no gradient).
    """
    ratio = torch.exp(log_ratio)
    rises = (advantages > 0) & (ratio > 1.0 + clip_high)
    falls = (advantages < 0) & (ratio < 1.0 - clip_low)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = rises | falls
    return -torch.where(clipped, bounded, ratio) * advantages, clipped


def sequence_sums(values: Float[Tensor, " tokens"], trajectory: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """For each token the sum of `values` over its trajectory."""
    total = values.new_zeros(int(trajectory.max()) + 1 if len(trajectory) else 0)
    return total.index_add(0, trajectory, values)[trajectory]


def sequence_means(values: Float[Tensor, " tokens"], trajectory: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """For each token the mean of `values` over its trajectory.

    Of log ratios it is the log of their geometric mean, GSPO's length-normalised sequence ratio: s_i = (pi(y) /
    pi_old(y))^(1 / |y|) (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 7).
    """
    return sequence_sums(values, trajectory) / sequence_sums(torch.ones_like(values), trajectory)


def require_finite(what: str, values: Float[Tensor, " tokens"], trajectory_ids: Sequence[str]) -> None:
    """Raise NonFiniteError naming up to five trajectories whose tokens have a NaN or infinite value."""
    bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
    if bad:
        names = list(dict.fromkeys(trajectory_ids[i] for i in bad))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise NonFiniteError(
            f"{what} is not finite at {len(bad)} of {len(values)} trained tokens, first {float(values[bad[0]])}, in "
            f"trajectory {', '.join(names[:5])}{more}; nothing was changed: look at the weights version that sampled "
            "them and at the trainer's last good save"
        )
