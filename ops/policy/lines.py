"""Packs a step's trajectories into lines: documents one after another, none sharing a token with another.

Context parallelism cuts one long line over ranks, and a causal ring knows documents, not trees; so prompts are repeated
here where `packing` shares them. Results do not depend on which of the two packed a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from furlong.ops.policy.packing import Masks, PackingError, recorded_experts
from furlong.ops.protocols import TrainBatch

NOBODY = -1
"""Document of a padding token, which attends to nothing and which nothing attends to."""


@dataclass(frozen=True)
class Line:
    """One forward/backward: a single row. Its fields are those of `packing.MicroBatch`, with documents for `visible`."""

    tokens: Int[Tensor, "1 width"]
    positions: Int[Tensor, "1 width"]
    """Distance from the document's first token; 0 at padding."""
    documents: Int[Tensor, "1 width"]
    """Query q attends to key k where both are of one document and k is not after q; NOBODY at padding."""
    places: Int[Tensor, " places"]
    place: Int[Tensor, " tokens"]
    target: Int[Tensor, " tokens"]
    trajectory: Int[Tensor, " tokens"]
    offset: Int[Tensor, " tokens"]
    experts: Int[Tensor, "1 width layers top_k"] | None = None


def pack_lines(batch: TrainBatch, masks: Masks, budget: int, multiple: int) -> list[Line]:
    """Lines that compute every reply token whose mask is true, in an order that depends on the batch alone.

    A reply is cut after its last wanted token, which is only predicted, never fed. Documents go, longest first (ties in
    the batch's order), into the first line that has room.

    Args:
        batch: valid by `check_batch`.
        masks: which reply tokens are wanted; `batch.masks` for training.
        budget: tokens of a line at most, padding included.
        multiple: every line's width is one of these; 2 * cp for a ring (`kernels.layout.line_layout`), times tp with
            sequence parallelism.
    Raises:
        PackingError: one trajectory alone is longer than the budget, rounded down to the multiple.
    """
    room = budget // multiple * multiple
    fed: dict[int, tuple[int, ...]] = {}
    for index, reply in enumerate(batch.replies):
        wanted = [offset for offset, on in enumerate(masks[index]) if on]
        if not wanted:
            continue
        fed[index] = batch.prompts[batch.group[index]] + reply[: wanted[-1]]
        if len(fed[index]) > room:
            raise PackingError(
                f"trajectory {batch.trajectory_ids[index]} needs {len(fed[index])} tokens in one line, more than "
                f"trainer.micro_batch_tokens={budget} allows in multiples of {multiple}; raise it or shorten prompts or "
                "sampling.max_new_tokens"
            )
    lines: list[list[int]] = []
    left: list[int] = []
    for index in sorted(fed, key=lambda index: -len(fed[index])):
        at = next((at for at, free in enumerate(left) if free >= len(fed[index])), len(lines))
        if at == len(lines):
            lines.append([])
            left.append(room)
        lines[at].append(index)
        left[at] -= len(fed[index])
    return [_line(batch, masks, [(index, fed[index]) for index in members], multiple) for members in lines]


def empty_line(like: Line, multiple: int) -> Line:
    """Padding alone, nothing wanted: what a rank computes while others still have lines such as `like`."""
    zeros = torch.zeros(1, multiple, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    experts = None if like.experts is None else torch.full((1, multiple, *like.experts.shape[2:]), -1)
    return Line(zeros, zeros, torch.full_like(zeros, NOBODY), none, none, none, none, none, experts)


def _line(batch: TrainBatch, masks: Masks, members: list[tuple[int, tuple[int, ...]]], multiple: int) -> Line:
    used = sum(len(fed) for _, fed in members)
    width = -(-used // multiple) * multiple
    tokens, positions = np.zeros((1, width), np.int64), np.zeros((1, width), np.int64)
    documents = np.full((1, width), NOBODY, np.int64)
    records = {index: record for index, _ in members if (record := recorded_experts(batch, index)) is not None}
    shapes = {(len(r.layers), r.top_k) for r in batch.routing if r is not None}
    experts = np.full((1, width, *shapes.pop()), -1, np.int64) if shapes else None
    wanted: list[tuple[int, int, int, int]] = []
    at = 0
    for document, (index, fed) in enumerate(members):
        span = slice(at, at + len(fed))
        tokens[0, span], positions[0, span], documents[0, span] = fed, np.arange(len(fed)), document
        if index in records:
            experts[0, span] = records[index][: len(fed)]
        first = at + len(batch.prompts[batch.group[index]]) - 1
        reply = batch.replies[index]
        wanted += [(first + offset, reply[offset], index, offset) for offset, on in enumerate(masks[index]) if on]
        at += len(fed)
    places, target, trajectory, offset = (
        torch.tensor(column, dtype=torch.int64) for column in zip(*wanted, strict=True)
    )
    arrays = (torch.from_numpy(array) for array in (tokens, positions, documents))
    place = torch.arange(len(places))
    return Line(
        *arrays, places, place, target, trajectory, offset, None if experts is None else torch.from_numpy(experts)
    )
