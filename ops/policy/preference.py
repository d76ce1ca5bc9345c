"""Direct preference optimisation on the best and the worst reply of each group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def preference_loss(
    logprobs: Float[Tensor, " tokens"],
    reference: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    group: Int[Tensor, " tokens"],
    beta: float,
) -> Float[Tensor, " tokens"]:
    """-log sigmoid(beta (m+ - m-)), m = sum over a side's trained tokens of log pi - log ref; mean over pairs.

    Rafailov et al. 2023, "Direct Preference Optimization", eq. 7, with pairs drawn from the policy itself.

    Args:
        advantages: above 0 on the better side's tokens, below 0 on the worse side's (`advantages.group_advantages`); a
            sample that branched has several trajectories on its side.
        group: of each token; each group is one pair, and one without trained tokens on both sides is none.
    Returns:
        each token's share; a pair's loss is spread evenly over its tokens, and all sum to the mean over pairs.
    """
    groups, of = torch.unique(group, return_inverse=True)
    side = torch.sign(advantages)

    def per_group(values: Tensor) -> Tensor:
        return values.new_zeros(len(groups)).index_add(0, of, values)

    margin = per_group(side * (logprobs - reference))
    is_pair = (per_group((side > 0).to(side.dtype)) > 0) & (per_group((side < 0).to(side.dtype)) > 0)
    used = is_pair[of] & (side != 0)
    size = per_group(used.to(side.dtype)).clamp(min=1)
    pairs = is_pair.sum().clamp(min=1)
    shares = -F.logsigmoid(beta * margin) / size / pairs
    return torch.where(used, shares[of], torch.zeros_like(logprobs))
