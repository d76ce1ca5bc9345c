"""Proof of which tokens' gradients went through the whole network: counted where they leave and where they arrive.

Autograd itself is asked, by hooks on two tensors: a token has left when the loss gave its log-probability a gradient
that is not zero, and its micro-batch has arrived when the gradient of the embedding's output is not zero. A detached
layer, a loss that was never propagated or a micro-batch that was skipped therefore counts nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.packing import MicroBatch


class Witness:
    """One step of one rank. Ranks that share micro-batches (pipeline stages) add up their `evidence` before counting."""

    def __init__(self, trajectories: int) -> None:
        """`trajectories` in the whole batch."""
        self._trajectories = trajectories
        self._left: list[Int[Tensor, " trajectories"]] = []
        self._arrived: list[int] = []

    def watch(self, micro: MicroBatch, logprobs: Float[Tensor, " tokens"] | None, trunk: Tensor | None) -> None:
        """Call after the forward and before the backward of each micro-batch, in the same order on every rank.

        Args:
            logprobs: of the micro-batch's tokens, with gradient; None on a rank that does not compute them.
            trunk: the embedding's output, of any shape; None on a rank that does not hold it.
        """
        number = len(self._left)
        self._left.append(torch.zeros(self._trajectories, dtype=torch.int64))
        self._arrived.append(0)
        trajectory = micro.trajectory.cpu()

        def leaves(gradient: Tensor) -> None:
            moved = trajectory[(gradient != 0).cpu()]
            self._left[number] += torch.bincount(moved, minlength=self._trajectories)

        def arrives(gradient: Tensor) -> None:
            self._arrived[number] = int(gradient.any())

        if logprobs is not None and logprobs.requires_grad:
            logprobs.register_hook(leaves)
        if trunk is not None and trunk.requires_grad:
            trunk.register_hook(arrives)

    def evidence(self) -> Int[Tensor, "micro_batches trajectories_and_one"]:
        """For each micro-batch the tokens that left, by trajectory, and in the last column whether it arrived."""
        if not self._left:
            return torch.zeros((0, self._trajectories + 1), dtype=torch.int64)
        return torch.cat([torch.stack(self._left), torch.tensor(self._arrived)[:, None]], dim=1)

    def counts(self) -> Int[Tensor, " trajectories"]:
        """Tokens of each trajectory that left in a micro-batch which arrived, on this rank alone."""
        return counts(self.evidence())


def counts(evidence: Int[Tensor, "micro_batches trajectories_and_one"]) -> Int[Tensor, " trajectories"]:
    """Tokens of each trajectory that left in a micro-batch which arrived, given evidence summed over its ranks."""
    return (evidence[:, :-1] * (evidence[:, -1:] > 0)).sum(0)
