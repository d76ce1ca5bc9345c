"""A draft that learns in megatron-core's schedules: on the last stage, in the forward step of each micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from furlong.resources.trainers.draft_trainer import DraftTrainer
from furlong.resources.trainers.megatron.draft_feed import draft_inputs
from furlong.resources.trainers.megatron.draft_taps import DraftTaps
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.model import Chunk
from furlong.resources.trainers.megatron.parallel import Place
from furlong.resources.trainers.ranks import device


class DraftPass:
    """One pass of a step's micro-batches, after `DraftTrainer.begin`; a `schedule.Student`.

    Micro-batches are dealt out over the ranks of tensor parallelism, and otherwise lie as the policy's do. Ranks of other
    stages learn nothing.
    """

    def __init__(
        self, draft: DraftTrainer, chunks: list[nn.Module], place: Place, temperature: float, feeds: list[Feed]
    ) -> None:
        """Called on all ranks.

        Args:
            chunks: this rank's, each wrapped for data parallelism.
            temperature: of the rollout.
            feeds: this rank's micro-batches.
        """
        self._draft, self._feeds, self._temperature = draft, feeds, temperature
        self._taps = DraftTaps(chunks, draft.shape.taps, place, feeds)
        self._head = whole_head(chunks[-1].module, place) if place.last_stage else None
        self.error: Exception | None = None
        """Why this rank stopped learning; others have gone on."""

    def passing(self) -> AbstractContextManager[None]:
        """Around the schedule; TapError where another stage is slow or gone."""
        return self._taps.tapping()

    def begin(self, chunk: Chunk, number: int) -> None:
        """See `schedule.Student`."""
        self._taps.begin(chunk, number)

    def learn(self, number: int) -> None:
        """See `schedule.Student`; TapError where another stage is slow or gone."""
        if not self._taps.travels(number):
            return
        tapped = self._taps.take(number, device())
        if tapped is None or self.error is not None:
            return
        feed = self._feeds[number]
        try:
            if given := draft_inputs(feed, tapped, self._draft, self._temperature):
                self._draft.learn(*given, self._head, feed.ring, feed.layout)
        except Exception as error:
            # The other stages wait for this one's part in the policy's pass: it goes on, and all are told afterwards.
            self.error = error


def whole_head(chunk: Chunk, place: Place) -> Float[Tensor, "vocab hidden"]:
    """The head of the last stage, on each of its ranks, which call it together.

    Once a step: where there are more rows than the hidden size is wide, this sends less than the ranks' logits would be.
    """
    rows = chunk.head_weight().detach()
    if place.layout.tp > 1:
        parts = [torch.empty_like(rows) for _ in range(place.layout.tp)]
        dist.all_gather(parts, rows.contiguous(), group=place.tp_group)
        rows = torch.cat(parts)
    return rows[: chunk.architecture.vocab]
