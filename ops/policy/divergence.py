"""Estimates, from sampled tokens, of how far two distributions are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from furlong.ops.policy.loss import require_finite


@dataclass(frozen=True)
class Mismatch:
    """Trainer against engine over the compared tokens of one step, in nat; d = trainer - engine."""

    mean: float
    """Mean |d|."""
    max: float
    """Largest |d|."""
    p99: float
    """Smallest |d| that at least 99 % of the tokens do not exceed."""
    k3: float
    """Mean of exp(d) - 1 - d: an estimate of KL(engine || trainer) that is never negative."""
    ess: float
    """Effective sample size of the weights exp(d), as a share of the tokens."""


def estimate(name: str, x: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Per-token estimates of KL(pi || ref) in nat from x = log pi - log ref at tokens drawn from pi.

    Schulman 2020, "Approximating KL divergence":

        k1 = x                    unbiased, of either sign; its gradient has mean 0, so it is of no use in a loss
        k2 = x^2 / 2              biased, never negative; its gradient x grad(log pi) is, in the mean, that of the KL
        k3 = exp(-x) - 1 + x      unbiased, never negative; its gradient (1 - exp(-x)) grad(log pi) is, in the mean,
                                  that of KL(ref || pi) (GRPO's choice: Shao et al. 2024, eq. 4)

    Raises:
        ValueError: another name.
    """
    if name == "k1":
        return x
    if name == "k2":
        return x.square() / 2
    if name == "k3":
        return torch.expm1(-x) + x
    raise ValueError(f"no divergence estimator {name!r}; use k1, k2 or k3")


def effective_share(d: Float[Tensor, " tokens"]) -> float:
    """(sum w)^2 / (n sum w^2) with w = exp(d): Kish's effective sample size as a share of the n tokens, in (0, 1].

    Raises:
        ValueError: no tokens, of which there is no share.
    """
    if not len(d):
        raise ValueError("the effective sample size of no tokens is not defined; leave the step without tokens out")
    # A common factor of the weights cancels, and without it none overflows.
    w = torch.exp(d.double() - d.double().max())
    return float(w.sum().square() / (w.square().sum() * len(w)))


def mismatch(
    trainer: Float[Tensor, " tokens"], engine: Float[Tensor, " tokens"], trajectory_ids: list[str]
) -> Mismatch:
    """Mean, largest, 99th percentile, k3 and effective sample size of d = trainer - engine.

    Args:
        trainer: log-probabilities (nat) of trained tokens under the trainer's arithmetic.
        engine: under the engine's, with the same weights version.
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
    k3 = estimate("k3", -d)
    require_finite("probability ratio trainer / engine", k3, trajectory_ids)
    ranked = d.abs().sort().values
    rank = -(-99 * len(ranked) // 100)
    return Mismatch(
        mean=float(ranked.mean()),
        max=float(ranked[-1]),
        p99=float(ranked[rank - 1]),
        k3=float(k3.mean()),
        ess=effective_share(d),
    )
