"""A linear layer whose weight lies in the order the CPU kernel reads it.

PyTorch's own linear has oneDNN reorder a bfloat16 weight at every call, which costs most of a decode step's time when
the batch is small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from furlong.ops.policy.row_bits import ALIGNED, Product, by_rows, cancelling


def kernel_name(dtype: torch.dtype) -> str:
    """`onednn` where weights can be packed, else `aten`; part of an engine's fingerprint, as results may differ."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "aten"
    native = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "onednn" if native else "aten"


class PackedLinear:
    """y = x W^T + b, for W made once from rows of several projections."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None = None):
        self.bias = bias
        self._packed = kernel_name(weight.dtype) == "onednn"
        self._shape = tuple(weight.shape)
        self._more = 0 if self._packed else -weight.shape[1] % ALIGNED
        whole = F.pad(weight, (0, self._more)) if self._more else weight
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else whole

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """The product in x's dtype, which must be the weight's; accumulated in float32.

        A row's bits do not depend on the other rows, unless `row_bits` is off.
        """
        kind = (self._packed, self._shape, x.dtype, self.bias is not None)
        return by_rows(self._product, x, kind, lambda rows: self._probe(rows, x.dtype))

    def unpacked(self) -> Shaped[Tensor, "outputs inputs"]:
        """The weight, bit for bit, read back from the memory that `__call__` multiplies with."""
        return self._weight.to_dense() if self._packed else self._weight[:, : self._shape[1]]

    def _product(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(F.pad(x, (0, self._more)) if self._more else x, self._weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")

    def _probe(self, rows: int, dtype: torch.dtype) -> tuple[Product, Tensor]:
        x, weight = cancelling(rows, *self._shape, dtype)
        bias = None if self.bias is None else torch.zeros_like(self.bias)
        return PackedLinear(weight, bias)._product, x
