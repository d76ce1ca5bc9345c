"""PPO's value model: beside the policy, with masters and an optimiser of its own, and never published.

It begins as the run's base model with a head that says 0. Whatever the policy's backend and layout, it is a Hugging Face
module that all ranks of the trainer share as `fsdp` shares a policy: micro-batches and masters.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from furlong.ops.policy.critic import critic_of, critic_rule
from furlong.ops.policy.gae import explained_variance, value_loss
from furlong.ops.policy.loss import NonFiniteError, require_finite
from furlong.ops.policy.objective import Objective
from furlong.ops.policy.packing import MicroBatch
from furlong.ops.policy.schedule import learning_rate
from furlong.ops.protocols import TrainBatch
from furlong.ops.spec import RunSpec
from furlong.ops.weights.layout import Piece, whole_piece
from furlong.resources.trainers.beside import Beside
from furlong.resources.trainers.fsdp_passes import share
from furlong.resources.trainers.masters import UPDATES, MasterWeights
from furlong.resources.trainers.module import PolicyModule, ValueModule
from furlong.resources.trainers.ranks import Ranks, device
from furlong.resources.trainers.sharded import ShardedMasters


class ValueModel(Beside):
    """PPO's."""

    prefix = "value/"

    def __init__(self, policy: PolicyModule, spec: RunSpec, recompute: bool, ranks: Ranks) -> None:
        """
        Args:
            policy: a module of its own, whose decoder is taken over.
            recompute: keep no activations within layers.
        """
        self.spec, self.critic, self.rule = spec, critic_of(spec.algorithm), critic_rule(spec.algorithm)
        self.ranks, self._budget = ranks, spec.trainer.micro_batch_tokens
        compute = getattr(torch, spec.trainer.compute_dtype)
        self.module = ValueModule(policy).to(device())
        if compute == torch.float64:
            self.module.widen()
        if recompute:
            self.module.recompute()
        self.masters: Any = (
            MasterWeights(self.module.named_weights(), self.rule, compute)
            if ranks.world == 1
            else ShardedMasters(self.module, self.rule, compute, ranks)
        )

    @torch.no_grad()
    def values(self, batch: TrainBatch, objective: Objective) -> Float[Tensor, " tokens"]:
        """The value before each trained token, by number, in float64."""
        flat = torch.zeros(objective.tokens, dtype=torch.float64)
        for micro in share(batch, batch.masks, self._budget, self.ranks):
            flat[objective.index(micro.trajectory, micro.offset)] = self.module(micro).to("cpu", torch.float64)
        return self.ranks.sum(flat)

    def learn(
        self,
        batch: TrainBatch,
        objective: Objective,
        values: Float[Tensor, " tokens"],
        targets: Float[Tensor, " tokens"],
    ) -> dict[str, float | None]:
        """The step's updates, towards `targets`; the `value_*` fields of StepMetrics.

        Args:
            values: as `values` gave them.
        Raises:
            NonFiniteError: on all ranks: a value or a gradient; the value model is as it was.
        """
        micros = share(batch, batch.masks, self._budget, self.ranks)
        rate = learning_rate(self.rule, self.spec.steps, batch.step)
        before = self._kept() if self.critic.updates > 1 else {}
        losses, norms = [], []
        try:
            for _ in range(self.critic.updates):
                self.masters.begin()
                losses.append(self._gradients(micros, objective, values, targets))
                norms.append(self.masters.gradient_norm())
                self.masters.update(rate, norms[-1])
        except NonFiniteError:
            if norms:
                self.masters.load_state(before.__getitem__)
            raise
        explained = explained_variance(values, targets)
        return {"value_loss": losses[0], "value_explained": explained, "value_grad_norm": max(norms)}

    def _gradients(self, micros: list[MicroBatch], objective: Objective, before: Tensor, targets: Tensor) -> float:
        """The loss, and its gradients added up in the masters."""
        found, fault = torch.zeros(objective.tokens, dtype=torch.float64), None
        for number, micro in enumerate(micros):
            at = objective.index(micro.trajectory, micro.offset)
            values = self.module(micro).to("cpu", torch.float64)
            names = [objective.names[index] for index in at.tolist()]
            try:
                require_finite("value", values.detach(), names)
            except NonFiniteError as err:
                # The other ranks need this one's backward pass, so they are told when it is over.
                fault = fault or err
            losses, _ = value_loss(values, before[at], targets[at], self.critic.clip, objective.denominators[at])
            found[at] = losses.detach()
            self.masters.expect(number == len(micros) - 1)
            losses.sum().backward()
        self.ranks.agree(fault)
        return float(self.ranks.sum(found).sum())

    def _kept(self) -> dict[Piece, Tensor]:
        """A copy of all that this rank's `load_state` asks for."""
        kept = {piece: tensor.clone() for piece, tensor in self.masters.state().items()}
        count = next(iter(self.masters.adamw.state.values()))["step"]
        return kept | {whole_piece(UPDATES, (1,)): count.reshape(1).cpu().clone()}
