"""The rotation that tells queries and keys where they are (Su et al. 2021)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Int
from torch import Tensor

_BLOCK = 1024
"""Positions per block of the table."""


class Rotation:
    """exp(i position frequency), for heads whose numbers that rotate together lie side by side."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, theta: float):
        # As transformers computes them: float32 throughout.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self._frequencies = 1.0 / theta**exponents
        # Scores are logarithms to base 2, whose inverse is computed several times as fast.
        query = torch.full((heads, 1), head_dim**-0.5 * math.log2(math.e))
        self._head_scale = torch.cat([query, torch.ones(kv_heads, 1)])
        self._table = torch.empty((0, head_dim // 2), dtype=torch.complex64)

    def turns(self, positions: Int[Tensor, " tokens"]) -> Complex[Tensor, "tokens rotated_heads pairs"]:
        """The factor of each rotated head, the query heads' times log2(e)/sqrt(head_dim).

        Tables are made in blocks of one size: vectorised functions treat what is left over of a vector otherwise.
        """
        table = self._table  # another thread may be lengthening it too
        while len(table) <= int(positions.max()):
            at = torch.arange(len(table), len(table) + _BLOCK)
            angles = at.float()[:, None] * self._frequencies
            table = torch.cat([table, torch.complex(angles.cos(), angles.sin())])
        self._table = table
        return table[positions][:, None] * self._head_scale
