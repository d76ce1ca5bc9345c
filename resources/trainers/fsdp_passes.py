"""How a batch goes through a Hugging Face module, on one rank or on several that share its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.objective import Objective
from furlong.ops.policy.packing import Masks, MicroBatch, empty_like, pack
from furlong.ops.policy.witness import Witness
from furlong.ops.protocols import TrainBatch
from furlong.resources.trainers.draft_taps import Taps
from furlong.resources.trainers.draft_trainer import DraftTrainer
from furlong.resources.trainers.module import PolicyModule
from furlong.resources.trainers.ranks import Ranks, device


class FSDPPasses:
    """Implements `rank_trainer.Passes`."""

    def __init__(self, module: PolicyModule, masters: Any, ranks: Ranks, budget: int) -> None:
        """`masters` of the module; `budget`: padded tokens per micro-batch at most."""
        self._module, self._masters, self._ranks, self._budget = module, masters, ranks, budget

    @torch.no_grad()
    def logprobs(
        self, batch: TrainBatch, masks: Masks, index: Callable[[MicroBatch], Tensor], size: int
    ) -> Float[Tensor, " size"]:
        return self._forward(batch, share(batch, masks, self._budget, self._ranks), index, size)

    def gradients(
        self, batch: TrainBatch, objective: Objective, draft: DraftTrainer | None
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Int[Tensor, " trajectories"]]:
        micros = share(batch, batch.masks, self._budget, self._ranks)
        slopes = None
        if objective.whole:
            before = self._forward(batch, micros, lambda m: objective.index(m.trajectory, m.offset), objective.tokens)
            slopes = objective.slopes(torch.arange(objective.tokens), before).slope
        values = torch.zeros(2, objective.tokens, dtype=torch.float64)
        witness, fault = Witness(len(batch.replies)), None
        with Taps(draft).on(self._module) if draft else nullcontext() as taps:
            for number, micro in enumerate(micros):
                where = objective.index(micro.trajectory, micro.offset)
                logprobs, entropy = self._module(micro, batch.temperature)
                values[0, where] = logprobs.detach().to("cpu", torch.float64)
                values[1, where] = entropy[micro.place].to("cpu", torch.float64)
                slope = torch.zeros(len(where), dtype=torch.float64)
                try:
                    if len(where):
                        slope = objective.slopes(where, logprobs).slope if slopes is None else slopes[where]
                except NonFiniteError as err:
                    # The other ranks need this one's backward pass, so they are told when it is over.
                    fault = fault or err
                witness.watch(micro, logprobs, self._module.trunk)
                self._masters.expect(number == len(micros) - 1)
                (logprobs * slope.to(logprobs)).sum().backward()
                if draft:
                    draft.learn(taps.inputs(micro, batch.temperature), *self._ends())
        self._ranks.agree(fault)
        logprobs, entropy = self._ranks.sum(values)
        return logprobs, entropy, self._ranks.sum(witness.counts())

    def _ends(self) -> tuple[Tensor, Tensor]:
        """The module's embedding and head; a sharded module lets go of them in the last backward pass of a step."""
        if isinstance(self._module, FSDPModule):
            self._module.unshard()
        return self._module.ends()

    @torch.no_grad()
    def _forward(
        self, batch: TrainBatch, micros: list[MicroBatch], index: Callable[[MicroBatch], Tensor], size: int
    ) -> Float[Tensor, " size"]:
        flat = torch.zeros(size, dtype=torch.float64)
        for micro in micros:
            flat[index(micro)] = self._module(micro, batch.temperature)[0].to("cpu", torch.float64)
        return self._ranks.sum(flat)


def share(batch: TrainBatch, masks: Masks, budget: int, ranks: Ranks) -> list[MicroBatch]:
    """This rank's micro-batches, as many as every other rank's: where they run out, empty ones."""
    packed = pack(batch, masks, budget, ranks.world)
    mine = packed[ranks.rank :: ranks.world]
    rounds = -(-len(packed) // ranks.world)
    mine += [empty_like(packed[0]) for _ in range(rounds - len(mine))]
    return [_at(micro, device()) for micro in mine]


def _at(micro: MicroBatch, where: torch.device) -> MicroBatch:
    """The micro-batch as the module reads it there; which token is whose stays on the CPU."""
    if where.type == "cpu":
        return micro
    read = ("tokens", "positions", "visible", "places", "place", "target", "experts")
    moved = {name: getattr(micro, name) for name in read if getattr(micro, name) is not None}
    return replace(micro, **{name: tensor.to(where) for name, tensor in moved.items()})
