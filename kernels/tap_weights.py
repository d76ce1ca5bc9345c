"""Gradients of the projection's weights: dW_l = dy^T a_l, summed over a step's micro-batches."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

WEIGHT_TAG, WEIGHT_GRADIENT_TAG = 3, 4


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class WeightGradients:
    """Running sums of dW_l for some layers."""

    def __init__(self, layers: Sequence[int], out: int, hidden: int, dtype: torch.dtype):
        self._layers = tuple(layers)
        self._shape, self.dtype = (len(layers), out, hidden), wide(dtype)
        self._sums = torch.zeros(self._shape, dtype=self.dtype)

    def add(self, gradient: Float[Tensor, "rows out"], taps: Float[Tensor, "layers rows hidden"]) -> None:
        for total, tap in zip(self._sums, taps, strict=True):
            total.addmm_(gradient.to(self.dtype).T, tap.to(self.dtype))

    def take(self) -> Float[Tensor, "layers out hidden"]:
        """The sums; the next begin at zero."""
        sums, self._sums = self._sums, torch.zeros(self._shape, dtype=self.dtype)
        return sums
