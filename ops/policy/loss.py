"""The clipped policy-gradient loss of one step, and how far trainer and engine were apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class NonFiniteError(ValueError):
    """A number that must be finite is not; the message names the trajectories or tensors."""


@dataclass(frozen=True)
class Mismatch:
    """Trainer against engine over the trained tokens of one step, in nat; d = trainer - engine."""

    mean: float
    """Mean |d|."""
    max: float
    """Largest |d|."""
    p99: float
    """Smallest |d| that at least 99 % of the tokens do not exceed."""
    k3: float
    """Mean of exp(d) - 1 - d: an estimate of KL(engine || trainer) that is never negative."""


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


def policy_loss(
    logprobs: Float[Tensor, " tokens"],
    engine_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    clip_low: float,
    clip_high: float,
    denominators: Float[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """L_t = -1/n_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) with r_t = exp(trainer - engine).

    PPO's clipped objective (Schulman et al. 2017, eq. 7) with a clip per side (Yu et al. 2025, "DAPO", eq. 8) and
    the mean that `denominators` describe, taken over the whole step. The ratio's denominator is the engine's own
    log-probability, the distribution the token was really drawn from, so train-rollout mismatch is corrected rather
    than ignored.

    Args:
        logprobs: the trainer's (nat), of the trained tokens of one micro-batch; differentiable.
        engine_logprobs: as recorded when the tokens were drawn, at the same temperature.
        advantages: each token's trajectory's.
        denominators: n_t from `token_denominators`, so that sums over micro-batches do not depend on the split.
    Returns:
        each token's share of the loss, to be summed; and which tokens had their ratio clipped (and give no gradient).
    Raises:
        ValueError: the shares of the tokens here add up to more than one, so the denominators are of a part of the step.
    """
    if float((1.0 / denominators.double()).sum()) > 1.0 + 1e-6:
        raise ValueError(
            f"denominators of {logprobs.shape[0]} tokens make more than one mean; take them over the whole step"
        )
    ratio = torch.exp(logprobs - engine_logprobs)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    with torch.no_grad():
        rises = (advantages > 0) & (ratio > 1.0 + clip_high)
        falls = (advantages < 0) & (ratio < 1.0 - clip_low)
    return -gain / denominators, rises | falls


def mismatch(
    trainer: Float[Tensor, " tokens"], engine: Float[Tensor, " tokens"], trajectory_ids: list[str]
) -> Mismatch:
    """Mean, largest, 99th percentile and k3 (Schulman 2020, "Approximating KL divergence") of d = trainer - engine.

    Args:
        trainer: log-probabilities (nat) of the trained tokens under the trainer's weights.
        engine: under the engine's weights of the same version.
        trajectory_ids: one per token, for the error.
    Raises:
        NonFiniteError: a NaN or an infinity on either side, or a difference whose exponential overflows.
        ValueError: no tokens at all: an empty comparison proves nothing.
    """
    if not len(trainer) == len(engine) == len(trajectory_ids) or not len(trainer):
        raise ValueError(
            f"mismatch over {len(trainer)} trainer and {len(engine)} engine log-probabilities with "
            f"{len(trajectory_ids)} trajectory ids; give the same number of each, at least one"
        )
    require_finite("log-probability of the trainer", trainer, trajectory_ids)
    require_finite("log-probability of the engine", engine, trajectory_ids)
    d = trainer.double() - engine.double()
    k3 = torch.expm1(d) - d
    require_finite("probability ratio trainer / engine", k3, trajectory_ids)
    ranked = d.abs().sort().values
    rank = -(-99 * len(ranked) // 100)
    return Mismatch(mean=float(ranked.mean()), max=float(ranked[-1]), p99=float(ranked[rank - 1]), k3=float(k3.mean()))


def require_finite(what: str, values: Float[Tensor, " tokens"], trajectory_ids: list[str]) -> None:
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
