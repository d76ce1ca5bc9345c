"""FSDPTrainer: the Hugging Face module under PyTorch, on one rank or sharded over several."""

from __future__ import annotations

from typing import Any

import torch

from furlong.ops.policy.parallel import Layout
from furlong.ops.spec import RunSpec
from furlong.ops.weights.layout import Piece
from furlong.resources.trainers.fsdp_passes import FSDPPasses
from furlong.resources.trainers.lora import LoraWeights
from furlong.resources.trainers.lora_module import lora_of
from furlong.resources.trainers.masters import MasterWeights
from furlong.resources.trainers.module import PolicyModule, load_module, module_of
from furlong.resources.trainers.rank_trainer import RankTrainer
from furlong.resources.trainers.ranks import device, require_data_parallel
from furlong.resources.trainers.sharded import ShardedMasters

ALONE = Layout()


class FSDPTrainer(RankTrainer):
    """A `Trainer` (ops/protocols.py)."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout = ALONE, rank: int = 0) -> None:
        """As `RankTrainer`; ValueError for a layout that splits more than micro-batches and masters."""
        require_data_parallel(layout)
        super().__init__(spec, threads, layout, rank)
        self.module: PolicyModule | None = None

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0.

        Raises:
            ValueError: an architecture without a packed forward, tensors missing from the files, or a NaN weight.
        """
        if self.spec.trainer.exact:
            from furlong.resources.trainers.exact_module import load_exact

            self._take(load_exact(folder))
        else:
            self._take(load_module(folder))
        self._begin(folder)

    def fingerprint(self) -> str:
        return super().fingerprint() + ("/exact" if self.spec.trainer.exact else "")

    def _hold(self, config: dict[str, Any], folder: str) -> None:
        if self.spec.trainer.exact:
            from furlong.resources.trainers.exact_module import exact_of

            self._take(exact_of(config))
        else:
            self._take(module_of(config))

    def _take(self, module: PolicyModule) -> None:
        module.to(device())
        if self.compute == torch.float64:
            module.widen()
        if self.layout.recompute:
            module.recompute()
        self.module, self.masters = module, self._masters(module)
        self.passes = FSDPPasses(module, self.masters, self.ranks, self.spec.trainer.micro_batch_tokens)
        self.config = module.architecture()

    def _masters(self, module: PolicyModule) -> MasterWeights | ShardedMasters | LoraWeights:
        if self.spec.trainer.lora:
            return lora_of(module, self.spec, self.compute, self.ranks)
        if self.ranks.world == 1:
            return MasterWeights(module.named_weights(), self.spec.algorithm, self.compute)
        return ShardedMasters(module, self.spec.algorithm, self.compute, self.ranks)

    def _limits(self) -> tuple[int, int, tuple[tuple[int, ...], int, int]]:
        config = self.module.causal.config
        return config.vocab_size, config.max_position_embeddings, self.module.expert_shape

    def _held(self) -> dict[Piece, torch.dtype]:
        return {piece: tensor.dtype for piece, tensor in self.masters.state().items()}
