"""Advantages of tokens, made of their trajectories' advantages and of log-probabilities under other models."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

WHITEN_FLOOR = 1e-8
"""Added to the deviation; it only keeps the division defined."""


def returns_after_divergence(
    rewards: Float[Tensor, " tokens"],
    k1: Float[Tensor, " tokens"],
    trajectory: Int[Tensor, " tokens"],
    beta: float,
) -> Float[Tensor, " tokens"]:
    """A_t = R - beta * sum over the trajectory's trained tokens i >= t of k1_i, k1 = log pi - log ref.

    REINFORCE++ (Hu et al. 2025, eq. for A(q, o_t) in section 3): the reward comes at the last token, each token pays
    for its divergence, and nothing is discounted.

    Args:
        rewards: each token's trajectory's.
        trajectory: ascending; a trajectory's tokens are in order.
    """
    # Summing backwards within each trajectory; a running total over the step would carry the rounding of others.
    later = torch.cat([part.flip(0).cumsum(0).flip(0) for part in k1.split(_runs(trajectory))] or [k1])
    return rewards - beta * later


def whitened(advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """(A - mean) / (deviation + WHITEN_FLOOR) over the step's trained tokens, the deviation with divisor n (Hu et al. 2025,
    "REINFORCE++", global batch normalisation)."""
    if not len(advantages):
        return advantages
    centred = advantages - advantages.mean()
    return centred / (centred.square().mean().sqrt() + WHITEN_FLOOR)


def towards_teacher(
    advantages: Float[Tensor, " tokens"],
    student: Float[Tensor, " tokens"],
    teacher: Float[Tensor, " tokens"],
    coefficient: float,
) -> Float[Tensor, " tokens"]:
    """A_t - coefficient * (log pi_student(t) - log pi_teacher(t)): on-policy distillation with the sampled token's reverse
    KL as a token reward (Agarwal et al. 2024, "On-Policy Distillation of Language Models", reverse KL; as an advantage:
    Thinking Machines 2025, "On-Policy Distillation")."""
    return advantages - coefficient * (student - teacher)


def _runs(trajectory: Int[Tensor, " tokens"]) -> list[int]:
    return torch.unique_consecutive(trajectory, return_counts=True)[1].tolist()
