"""MegatronTrainer: megatron-core's GPT model, laid over ranks by tensor, pipeline, context, expert and data parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from furlong.ops.policy.architecture import Architecture, architecture_of, read_architecture
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.parallel import Layout
from furlong.ops.spec import RunSpec
from furlong.ops.weights.layout import Piece
from furlong.resources.trainers.megatron import parallel, schedule, shims
from furlong.resources.trainers.megatron.lora import MegatronLora
from furlong.resources.trainers.megatron.model import build
from furlong.resources.trainers.megatron.passes import MegatronPasses
from furlong.resources.trainers.megatron.state import MegatronMasters
from furlong.resources.trainers.rank_trainer import RankTrainer


class MegatronTrainer(RankTrainer):
    """A `Trainer` (ops/protocols.py)."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout, rank: int, deadline: float = 1800.0) -> None:
        """As `RankTrainer`.

        Args:
            deadline: seconds that any wait for another rank may take.
        Raises:
            ShimError: megatron-core is missing or untested.
            SpecError: the layout is for another number of ranks.
        """
        super().__init__(spec, threads, layout, rank)
        self.place = parallel.initialise(layout, rank, layout.world, deadline)
        self.architecture: Architecture | None = None

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0.

        Raises:
            ModelError: an architecture that is unknown or does not fit the layout, or tensors missing from the files.
            NonFiniteError: a NaN or infinite weight.
        """
        read_architecture(folder)  # for its error, where there is no model
        self._hold(json.loads((Path(folder) / "config.json").read_text()), folder)
        nothing = {name: Piece(name, 0, 0, 0) for name in self.architecture.shapes()}
        held = read_tensors(folder, self.architecture, self.masters.dtype, nothing | self.masters.pieces)
        self.masters.load_weights(lambda piece: held[piece.name])
        self._begin(folder)

    def fingerprint(self) -> str:
        return f"{super().fingerprint()}/megatron-core={shims.VERSION}"

    def _hold(self, config: dict[str, Any], folder: str) -> None:
        self.architecture = architecture_of(config, Path(folder) / "config.json")
        chunks = build(self.architecture, self.place, self.compute)
        schedule.prepare(chunks)
        if self.spec.trainer.lora:
            self.masters = MegatronLora(chunks, self.spec, self.ranks)
        else:
            self.masters = MegatronMasters(chunks, self.spec.algorithm, self.ranks)
        budget = self.spec.trainer.micro_batch_tokens
        self.passes = MegatronPasses(self.masters.chunks, self.place, self.ranks, budget)
        self.config = config

    def _limits(self) -> tuple[int, int, tuple[tuple[int, ...], int, int]]:
        a = self.architecture
        return a.vocab, a.context, (a.expert_layers, a.top_k, a.experts)

    def _held(self) -> dict[Piece, torch.dtype]:
        dtypes = self.masters.dtypes()
        return {piece: dtypes[piece.name] for piece in self.masters.state_pieces() if piece.name in dtypes}
