"""The activation of a gated feed-forward block, with the same bits for a row whatever rows are computed beside it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def gated(both: Float[Tensor, "rows gate_and_up"]) -> Float[Tensor, "rows ffn"]:
    """silu(gate) * up with silu(z) = z / (1 + exp(-z)) (Shazeer 2020), in float32, then rounded to the input's dtype.

    PyTorch's own silu computes what a vector or a thread's share leaves over by another formula, so its last bit depends
    on how many rows there are; these four operations are rounded alike everywhere.

    Args:
        both: the gate's columns, then as many of the other product.
    """
    gate, up = both.chunk(2, dim=-1)
    z = gate.float()
    # The copy of -z is contiguous, as strided exponentials take another path.
    slope = torch.neg(z).contiguous().exp_().add_(1.0)
    return torch.div(z, slope, out=slope).to(both.dtype) * up
