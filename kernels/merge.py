"""Two attentions of the same queries over disjoint keys become one: the softmax over both, from outputs and masses."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def merge(
    out_a: Float[Tensor, "*queries head_dim"],
    lse_a: Float[Tensor, "*queries"],
    out_b: Float[Tensor, "*queries head_dim"],
    lse_b: Float[Tensor, "*queries"],
) -> tuple[Float[Tensor, "*queries head_dim"], Float[Tensor, "*queries"]]:
    """Attention over the keys of a and of b together (FlashAttention-2, Dao 2023, section 3.1).

    Commutative bitwise and associative up to rounding; (0, -inf), a query that saw no key, is the identity bitwise, and
    two of them give itself. Log-sum-exps are natural. Accurate for any gap between the two: only the smaller one's
    share of the larger is exponentiated.

    Args:
        out_a, lse_a, out_b, lse_b: in one wide dtype (float64, or float32 for narrower inputs).
    """
    top = torch.maximum(lse_a, lse_b)
    # -inf - -inf is NaN; any finite number stands in for a query that saw nothing, whose shares are then both 0.
    level = top.masked_fill(top == float("-inf"), 0.0)
    share_a, share_b = torch.exp(lse_a - level), torch.exp(lse_b - level)
    mass = share_a + share_b
    lse = top + mass.clamp_min(1.0).log()
    mass = mass.clamp_min(1.0)
    return out_a * (share_a / mass)[..., None] + out_b * (share_b / mass)[..., None], lse
