"""The activation of a gated feed-forward block, with the same bits for a row whatever rows are computed beside it."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from furlong.ops.policy.row_bits import alone

_WHOLE = 64
"""Columns in a vector loop's longest step. What is left over of it, PyTorch's silu computes by another formula."""


def gated(both: Float[Tensor, "rows gate_and_up"]) -> Float[Tensor, "rows ffn"]:
    """silu(gate) * up with silu(z) = z / (1 + exp(-z)) (Shazeer 2020), each rounded to the input's dtype.

    Args:
        both: the gate's columns, then as many of the other product.
    """
    gate, up = both.chunk(2, dim=-1)
    size = gate.shape[-1]
    if more := -size % _WHOLE:
        gate = F.pad(gate, (0, more))
    return alone(lambda: F.silu(gate))[..., :size] * up
