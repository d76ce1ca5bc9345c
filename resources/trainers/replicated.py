"""Masters that every rank holds whole and alike, behind the interface of `masters.py`: for a model that is small beside the
policy, and that no other way of laying a policy over ranks has to know of.

Each rank adds up the gradients of what it was given; the sums are added up over ranks, and all take the same step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from furlong.ops.spec import AlgorithmSpec
from furlong.ops.weights.layout import Piece
from furlong.resources.trainers.masters import MasterWeights
from furlong.resources.trainers.ranks import Ranks


class ReplicatedMasters(MasterWeights):
    """A rank that was given nothing has gradients of 0."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], algorithm: AlgorithmSpec, compute: torch.dtype, ranks: Ranks
    ) -> None:
        """As `MasterWeights`; all ranks hold the parameters alike."""
        super().__init__(parameters, algorithm, compute)
        self.ranks = ranks
        # One run of memory for all gradients, so that they are summed over ranks in one go.
        counts = [weight.numel() for weight in self.weights.values()]
        first = next(iter(self.weights.values()))
        self._sums = torch.zeros(sum(counts), dtype=first.dtype, device=first.device)
        for weight, part in zip(self.weights.values(), self._sums.split(counts), strict=True):
            weight.grad = part.view_as(weight)

    def gradient_norm(self) -> float:
        """See `MasterWeights.gradient_norm`; the gradients are summed over the ranks here, the norm is the same on all."""
        for name, weight in self.weights.items():
            if name not in self._counted:
                weight.grad.zero_()
        self._counted.update(self.weights)
        self.ranks.sum(self._sums)
        return super().gradient_norm()

    def state(self) -> dict[Piece, Tensor]:
        """See `MasterWeights.state`; what all have is rank 0's to write."""
        return super().state() if self.ranks.first else {}

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """See `MasterWeights.export`; nothing on ranks but the first."""
        return super().export(dtype) if self.ranks.first else {}
