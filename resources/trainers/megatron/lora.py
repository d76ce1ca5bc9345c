"""Adapters on megatron-core's model chunks, in any layout: one rank of those that hold a piece takes its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from furlong.ops.policy.lora import is_adapted
from furlong.ops.spec import RunSpec
from furlong.resources.trainers.lora import LoraWeights, Part
from furlong.resources.trainers.masters import master_dtype
from furlong.resources.trainers.megatron.model import Chunk
from furlong.resources.trainers.megatron.names import Held, pieces
from furlong.resources.trainers.ranks import Ranks, device


class MegatronLora(LoraWeights):
    """The interface of `masters.py`; every method is called on all ranks."""

    def __init__(self, modules: list[Chunk], spec: RunSpec, ranks: Ranks) -> None:
        """`modules`: this rank's chunks of the model; their weights need not be there yet."""
        compute = next(modules[0].parameters()).dtype
        # A sum, never a mean: the objective's denominators are those of the whole step.
        modules[0].config.calculate_per_token_loss = True
        # Gradients are summed to all ranks that hold a weight: its optimiser, which would be cut, is not megatron-core's.
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=master_dtype(compute) == torch.float32, use_distributed_optimizer=False
        )
        # Weights without an adapter have gradients too, which nobody reads: megatron-core expects them at its ends.
        self.chunks = [DistributedDataParallel(module.config, settings, module) for module in modules]
        for module in modules:
            for parameter in module.parameters():
                parameter.data.zero_()  # rows that pad a vocabulary belong to no tensor
        self._held_pieces = list(pieces(modules).values())
        parts = [Part(held.piece, _writer(held), held.owner) for held in self._held_pieces]
        super().__init__(parts, modules[0].architecture.shapes(), spec, compute, ranks, device())

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        super().begin()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def gradient_norm(self) -> float:
        """See `LoraWeights.gradient_norm`."""
        finalize_model_grads(self.chunks)
        for held in self._held_pieces:
            if held.owner and is_adapted(held.piece.name):
                self.add(held.piece, held.get(held.parameter.main_grad))
        return super().gradient_norm()


def _writer(held: Held) -> Callable[[Tensor], None]:
    return lambda values: held.put(held.parameter.data, values)
