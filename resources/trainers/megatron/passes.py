"""The two ways in which a batch goes through the model: to know its log-probabilities, and to learn from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.objective import Objective, TokenLoss
from furlong.ops.policy.packing import Masks
from furlong.ops.policy.witness import Witness, counts
from furlong.ops.protocols import TrainBatch
from furlong.resources.trainers.draft_trainer import DraftTrainer
from furlong.resources.trainers.megatron import schedule
from furlong.resources.trainers.megatron.draft_pass import DraftPass
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.parallel import Place
from furlong.resources.trainers.ranks import Ranks, device


class MegatronPasses:
    """Implements `rank_trainer.Passes`."""

    def __init__(self, chunks: list[nn.Module], place: Place, ranks: Ranks, budget: int) -> None:
        """
        Args:
            chunks: this rank's, wrapped for data parallelism.
            budget: padded tokens per micro-batch at most.
        """
        self._chunks, self._place, self._ranks, self._budget = chunks, place, ranks, budget

    def logprobs(
        self, batch: TrainBatch, masks: Masks, index: Callable[[Feed], Tensor], size: int
    ) -> Float[Tensor, " size"]:
        flat = torch.zeros(size, dtype=torch.float64)

        def head(feed: Feed, logprobs: Tensor, entropy: Tensor) -> None:
            if self._counts:
                flat[index(feed)] = logprobs.to("cpu", torch.float64)

        schedule.run(self._chunks, self._feeds(batch, masks), batch.temperature, head, None, backward=False)
        return self._ranks.sum(flat)

    def gradients(
        self, batch: TrainBatch, objective: Objective, draft: DraftTrainer | None
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Int[Tensor, " trajectories"]]:
        def index(feed: Feed) -> Tensor:
            return objective.index(feed.trajectory, feed.offset)

        whole: TokenLoss | None = None
        if objective.whole:
            before = self.logprobs(batch, batch.masks, index, objective.tokens)
            whole = objective.slopes(torch.arange(objective.tokens), before)
        found = torch.zeros(2, objective.tokens, dtype=torch.float64)
        errors: list[NonFiniteError] = []

        def head(feed: Feed, logprobs: Tensor, entropy: Tensor) -> Tensor:
            at = index(feed)
            if self._counts:
                found[:, at] = torch.stack([logprobs.detach(), entropy[feed.place]]).to("cpu", torch.float64)
            try:
                slope = whole.slope[at] if whole else objective.slopes(at, logprobs).slope
            except NonFiniteError as err:
                # The other stages wait for this one's gradients, so it goes on, and what comes of it is thrown away.
                errors.append(err)
                slope = torch.zeros(logprobs.shape)
            return (logprobs * slope.to(logprobs)).sum()

        witness, feeds = Witness(len(batch.replies)), self._feeds(batch, batch.masks)
        student = DraftPass(draft, self._chunks, self._place, batch.temperature, feeds) if draft else None
        with student.passing() if student else nullcontext():
            schedule.run(self._chunks, feeds, batch.temperature, head, witness.watch, backward=True, student=student)
        self._ranks.agree(errors[0] if errors else student and student.error)
        self._ranks.sum(found)
        return found[0], found[1], self._arrived(witness)

    def _feeds(self, batch: TrainBatch, masks: Masks) -> list[Feed]:
        return schedule.share(batch, masks, self._budget, self._place, device())

    def _arrived(self, witness: Witness) -> Int[Tensor, " trajectories"]:
        """Ranks of one dp share micro-batches: what left on one of them may have arrived on another."""
        evidence = witness.evidence()
        if not self._counts:
            evidence[:, :-1] = 0
        everybody = torch.zeros(self._place.layout.dp, *evidence.shape, dtype=torch.int64)
        everybody[self._place.dp] = evidence
        return counts(self._ranks.sum(everybody).flatten(0, 1))

    @property
    def _counts(self) -> bool:
        """Whether this rank's log-probabilities enter sums over ranks: those of a tp group all have the same."""
        return self._place.tp == 0
