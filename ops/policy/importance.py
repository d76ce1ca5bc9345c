"""Importance weights and rejections of tokens that another engine, or other weights, sampled.

d = trainer - engine (nat) under the step's starting weights. Everything here is a constant to the gradient.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.ops.policy.corrections import Correction
from furlong.ops.policy.loss import sequence_means, sequence_sums

VANISHED = 1e-30
"""Tokens of a smaller weight are rejected."""


def log_ratio_at(
    level: str, d: Float[Tensor, " tokens"], trajectory: Int[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """log of the ratio at `level`: d_t, its trajectory's sum of d, or its trajectory's mean of d."""
    if level == "token":
        return d
    return sequence_sums(d, trajectory) if level == "sequence" else sequence_means(d, trajectory)


def weigh(
    correction: Correction, d: Float[Tensor, " tokens"], trajectory: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Bounded importance weights, before normalisation, and the tokens that `mask` rejects.

    With w = exp(log_ratio_at(level)):

        truncate  min(w, high)             TIS, Yao et al. 2025
        clip      min(max(w, low), high)
        mask      w, and rejected where w < low or w > high      IcePop, Ling Team 2025; MIS, Liu et al. 2025

    Bounds are compared as logarithms, so a long trajectory's product of ratios does not overflow.
    """
    log_w = log_ratio_at(correction.level, d, trajectory)
    low, high = _log(correction.low), math.log(correction.high)
    if correction.mode == "mask":
        return torch.exp(log_w.clamp(max=high)), (log_w < low) | (log_w > high)
    floor = low if correction.mode == "clip" else -math.inf
    return torch.exp(log_w.clamp(floor, high)), torch.zeros_like(log_w, dtype=torch.bool)


def rejections(
    correction: Correction,
    d: Float[Tensor, " tokens"],
    trajectory: Int[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
) -> Bool[Tensor, " tokens"]:
    """Tokens rejected whatever their weight: any of

    bounds      exp(log_ratio_at(reject)) outside [reject_low, reject_high]
    veto        a trained token of the trajectory has exp(d) < veto                  (Liu et al. 2025)
    off-policy  A_t < 0 and mean of (engine - trainer) over the trajectory > off_policy
                (DeepSeek-AI 2025, "DeepSeek-V3.2", off-policy sequence masking)
    """
    out = torch.zeros_like(d, dtype=torch.bool)
    if correction.reject:
        ratio = log_ratio_at(correction.reject, d, trajectory)
        out |= (ratio < _log(correction.reject_low)) | (ratio > _log(correction.reject_high))
    if correction.veto:
        out |= sequence_sums((d < math.log(correction.veto)).to(d.dtype), trajectory) > 0
    if correction.off_policy:
        out |= (advantages < 0) & (sequence_means(-d, trajectory) > correction.off_policy)
    return out


def normalised(weights: Float[Tensor, " tokens"], rejected: Bool[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Weights divided by the mean of those not rejected, over the whole step: w_t / (sum of kept w / number kept)."""
    kept = ~rejected
    total = weights[kept].sum()
    return weights * (kept.sum() / total) if total > 0 else weights


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
