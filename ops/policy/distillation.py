"""Distillation from a teacher's k most likely tokens. A pure function; no run can select it yet."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def top_k_reverse_kl(
    student: Float[Tensor, "tokens k"], teacher: Float[Tensor, "tokens k"]
) -> Float[Tensor, " tokens"]:
    """sum over the k tokens of p log(p / q), plus P log(P / Q) of what is left, P = 1 - sum p and Q = 1 - sum q.

    KL(student || teacher) (Gu et al. 2024, "MiniLLM", eq. 1) of the two distributions with all other tokens taken as one.
    Merging outcomes never raises a divergence, so this is a lower bound of the full one, at least 0, and equal to it when
    the k tokens are the whole vocabulary. Unlike the plain sum over k tokens it cannot be lowered by moving probability
    out of them.

    Args:
        student: log-probabilities (nat) of k distinct tokens at each position, the same ones as `teacher`'s; differentiable.
        teacher: finite, as a served teacher returns them.
    Returns:
        the divergence (nat) at each position; its gradient goes to `student`.
    Raises:
        ValueError: log-probabilities that are not finite, or whose probabilities sum to more than 1.
    """
    for name, logprobs in (("student", student.detach()), ("teacher", teacher)):
        mass = torch.exp(logprobs).sum(-1)
        if not bool(torch.isfinite(logprobs).all()) or bool((mass > 1 + 1e-4).any()):
            raise ValueError(
                f"the {name}'s top-k log-probabilities have a probability of {mass.max().item()} in one position, or are "
                "not finite; give log-probabilities of distinct tokens after the softmax"
            )
    p = torch.exp(student)
    inside = (p * (student - teacher)).sum(-1)
    return inside + _rest(1 - p.sum(-1), 1 - torch.exp(teacher).sum(-1))


def _rest(p: Float[Tensor, " tokens"], q: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    # What a sum of probabilities leaves of 1 is rounding below this, and its logarithm would be noise.
    noise = 8 * torch.finfo(p.dtype).eps
    some = p > noise
    safe_p = torch.where(some, p, torch.ones_like(p))
    return torch.where(some, safe_p * (torch.log(safe_p) - torch.log(q.clamp(min=noise))), torch.zeros_like(p))
