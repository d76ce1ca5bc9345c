"""What a draft learns from in a micro-batch of a Hugging Face module: its documents, with the states of the policy's own
forward pass, which does nothing more for it than to leave them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from furlong.kernels.layout import Rows
from furlong.ops.draft.inputs import DraftInputs
from furlong.ops.policy.packing import MicroBatch
from furlong.resources.trainers.draft_trainer import DraftTrainer
from furlong.resources.trainers.module import FINAL, PolicyModule


class Taps:
    """What one forward pass after the other leaves."""

    def __init__(self, draft: DraftTrainer) -> None:
        self._draft = draft
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def on(self, module: PolicyModule) -> Iterator[Taps]:
        """For as long, keep what the module's last forward pass left."""
        with module.watched(self._draft.shape.taps, self._states.__setitem__):
            yield self

    def inputs(self, micro: MicroBatch, temperature: float) -> DraftInputs:
        """Those of the last forward, which was of this micro-batch; they are given once."""
        index, rows, trained, trajectories = documents(micro)
        found = {place: state.flatten(0, 1).index_select(0, index) for place, state in self._states.items()}
        self._states.clear()
        return DraftInputs(
            rows=rows,
            tokens=micro.tokens.flatten().index_select(0, index),
            taps=torch.cat([found[layer] for layer in self._draft.shape.taps], 1),
            final=found[FINAL],
            trained=trained,
            temperature=temperature,
            offsets=self._draft.offsets(trajectories),
        )


def documents(micro: MicroBatch) -> tuple[Int[Tensor, " rows"], Rows, Bool[Tensor, " rows"], list[int]]:
    """The trajectories of a packed micro-batch one after the other, each from its prompt's first token to the last that was
    fed; what several share is there for each.

    Returns:
        index: which of the micro-batch's rows * width tokens each row is.
        rows: with documents numbered from 0.
        trained: whether the token that follows the row is wanted.
        trajectories: of each document, its index in the batch.
    """
    width, positions = micro.tokens.shape[1], micro.positions.flatten()
    at = micro.place.new_zeros(0) if not len(micro.place) else micro.places[micro.place]
    trajectories = micro.trajectory.unique().tolist()
    index, document, trained = [at.new_zeros(0)], [at.new_zeros(0)], [at.new_zeros(0, dtype=torch.bool)]
    for number, trajectory in enumerate(trajectories):
        wanted = at[(micro.trajectory == trajectory).to(at.device)]
        last = wanted[positions[wanted].argmax()]
        # A token sees its own sequence up to itself; the tree numbers what comes before with lower numbers.
        found = micro.visible[last // width, 0, last % width].nonzero().flatten() + last // width * width
        index.append(found)
        document.append(torch.full_like(found, number))
        trained.append(torch.isin(found, wanted))
    whole = torch.cat(index)
    return whole, Rows(torch.cat(document), positions[whole]), torch.cat(trained), trajectories
