"""Root-mean-square normalisation with transformers' roundings, for whole and sequence-parallel activations."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019).

    The quotient is computed in float32 (float64 for float64 inputs) and rounded to the input's dtype before the product,
    as transformers rounds it.
    """

    def __init__(self, config, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        # Read by megatron-core: each rank normalised other positions, so that gradients are sums over the tp ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        """Normalise the last dimension."""
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
