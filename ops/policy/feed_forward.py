"""The feed-forward block of a dense decoder layer."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.gated import gated
from furlong.ops.policy.packed_linear import PackedLinear


class FeedForward:
    """Gate and up are one product."""

    @staticmethod
    def names(arch: Architecture, index: int) -> dict[str, str]:
        """Part -> Hugging Face name."""
        return {part: f"model.layers.{index}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}

    def __init__(self, arch: Architecture, index: int, tensors: dict[str, Tensor]):
        part = {key: tensors[name] for key, name in self.names(arch, index).items()}
        self._gate_up = PackedLinear(torch.cat([part["gate"], part["up"]]))
        self._down = PackedLinear(part["down"])

    def __call__(
        self, normed: Float[Tensor, "tokens hidden"], replayed: None = None
    ) -> tuple[Float[Tensor, "tokens hidden"], None]:
        """down(silu(gate) * up) in the dtype of `normed`; no experts were chosen, nor can any be replayed."""
        return self._down(gated(self._gate_up(normed))), None

    def served(self, arch: Architecture, index: int) -> dict[str, Tensor]:
        """The block's tensors by Hugging Face name, read back from the copies that the products use."""
        gate, up = self._gate_up.unpacked().chunk(2)
        parts = {"gate": gate, "up": up, "down": self._down.unpacked()}
        return {name: parts[part] for part, name in self.names(arch, index).items()}
