"""Packs a step's trajectories into few, dense micro-batches.

A packed row is a prefix tree: the prompt of one group once, then the replies, and what several replies begin with
once as well. A token sees its own prefix only, so its hidden state is that of the unpacked sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from furlong.ops.protocols import TrainBatch

Masks = tuple[tuple[bool, ...], ...]


class PackingError(ValueError):
    """A batch that cannot be packed; the message names the trajectory or the group."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward/backward. Padding is token 0 that sees only itself and is read by nobody."""

    tokens: Int[Tensor, "rows width"]
    positions: Int[Tensor, "rows width"]
    """Distance from the sequence's first token: the depth in the tree."""
    visible: Bool[Tensor, "rows 1 width width"]
    """visible[r, 0, q, k]: query q attends to key k, i.e. k is q or before it in q's sequence."""
    places: Int[Tensor, " places"]
    """Flat indices into rows * width at which a next token is wanted: the only ones the LM head runs at."""
    place: Int[Tensor, " tokens"]
    """For each wanted token, the index into `places` of the position that predicts it."""
    target: Int[Tensor, " tokens"]
    trajectory: Int[Tensor, " tokens"]
    """Index of its trajectory in the batch."""
    offset: Int[Tensor, " tokens"]
    """Index of the token in its reply."""


@dataclass
class _Row:
    """A prefix tree under construction; node 0 is the prompt's first token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    wanted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(node, target, trajectory, offset) of each wanted token."""

    def missing(self, sequence: tuple[int, ...]) -> int:
        """How many nodes adding `sequence` would make."""
        node = -1
        for depth, token in enumerate(sequence):
            node = self.children.get((node, token), -2)
            if node == -2:
                return len(sequence) - depth
        return 0

    def add(self, sequence: tuple[int, ...]) -> list[int]:
        """The nodes of `sequence`, made where missing."""
        node, path = -1, []
        for token in sequence:
            child = self.children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
            path.append(node := child)
        return path


def pack(batch: TrainBatch, masks: Masks, budget: int) -> list[MicroBatch]:
    """Micro-batches that compute every reply token whose mask is true, in an order that depends on the batch alone.

    A reply is cut after its last wanted token, and that token itself is only predicted, never fed. Trajectories
    without a wanted token are left out. Rows are sorted by width (longest first, ties in the batch's order) so that
    rows padded to one width differ little, and a micro-batch takes rows while rows * width stays within the budget.

    Args:
        batch: valid by `check_batch`.
        masks: which reply tokens are wanted; `batch.masks` for training.
        budget: padded tokens per micro-batch at most. A group's tree that is larger is spread over several rows.
    Raises:
        PackingError: one trajectory alone is longer than the budget.
    """
    rows = [row for group in range(len(batch.prompts)) for row in _rows_of_group(batch, masks, group, budget)]
    rows.sort(key=lambda row: -len(row.tokens))
    packed, taken = [], 0
    while taken < len(rows):
        count = budget // len(rows[taken].tokens)
        packed.append(_micro_batch(rows[taken : taken + count]))
        taken += count
    return packed


def _rows_of_group(batch: TrainBatch, masks: Masks, group: int, budget: int) -> list[_Row]:
    rows: list[_Row] = []
    for index in (i for i, of in enumerate(batch.group) if of == group and any(masks[i])):
        wanted = [offset for offset, on in enumerate(masks[index]) if on]
        prompt, reply = batch.prompts[group], batch.replies[index]
        sequence = prompt + reply[: wanted[-1]]
        if len(sequence) > budget:
            raise PackingError(
                f"trajectory {batch.trajectory_ids[index]} needs {len(sequence)} tokens in one row, more than "
                f"trainer.micro_batch_tokens={budget}; raise it or shorten prompts or sampling.max_new_tokens"
            )
        if not rows or len(rows[-1].tokens) + rows[-1].missing(sequence) > budget:
            rows.append(_Row())
        path = rows[-1].add(sequence)
        rows[-1].wanted += [(path[len(prompt) - 1 + offset], reply[offset], index, offset) for offset in wanted]
    return rows


def _micro_batch(rows: list[_Row]) -> MicroBatch:
    width = len(rows[0].tokens)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    visible = np.zeros((len(rows), 1, width, width), np.bool_)
    visible[:, 0, np.arange(width), np.arange(width)] = True
    wanted = []
    for r, row in enumerate(rows):
        tokens[r, : len(row.tokens)] = row.tokens
        for node, parent in enumerate(row.parents):
            if parent >= 0:
                visible[r, 0, node] |= visible[r, 0, parent]
                positions[r, node] = positions[r, parent] + 1
        wanted += [(r * width + node, *rest) for node, *rest in row.wanted]
    flat, target, trajectory, offset = (torch.tensor(column, dtype=torch.int64) for column in zip(*wanted, strict=True))
    places, place = torch.unique(flat, return_inverse=True)
    arrays = (torch.from_numpy(array) for array in (tokens, positions, visible))
    return MicroBatch(*arrays, places, place, target, trajectory, offset)


def check_batch(batch: TrainBatch, vocabulary: int, context: int) -> None:
    """Raise PackingError unless the batch's parts fit together and every token fits the model.

    Args:
        vocabulary: token ids must be below it.
        context: longest prompt + reply the model takes, in tokens.
    """
    count = len(batch.trajectory_ids)
    for name in ("group", "replies", "logprobs", "masks", "fresh", "advantages"):
        if len(getattr(batch, name)) != count:
            raise PackingError(f"{len(getattr(batch, name))} {name} for {count} trajectories; give one for each")
    if not batch.temperature > 0:
        raise PackingError(f"temperature {batch.temperature} has no distribution to train on; sample above 0")
    for group, prompt in enumerate(batch.prompts):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise PackingError(f"prompt of group {group} is empty or has a token outside [0, {vocabulary}); rebuild it")
    for index, name in enumerate(batch.trajectory_ids):
        reply, group = batch.replies[index], batch.group[index]
        if not len(reply) == len(batch.logprobs[index]) == len(batch.masks[index]) == len(batch.fresh[index]):
            raise PackingError(
                f"trajectory {name}: {len(reply)} tokens, {len(batch.logprobs[index])} log-probabilities, "
                f"{len(batch.masks[index])} mask entries and {len(batch.fresh[index])} of `fresh`; give one per token"
            )
        if not 0 <= group < len(batch.prompts):
            raise PackingError(f"trajectory {name}: group {group} of {len(batch.prompts)}; index into `prompts`")
        if reply and not 0 <= min(reply) <= max(reply) < vocabulary:
            raise PackingError(f"trajectory {name}: a token outside [0, {vocabulary}); use the model's own tokenizer")
        if len(batch.prompts[group]) + len(reply) > context:
            raise PackingError(
                f"trajectory {name}: prompt and reply have {len(batch.prompts[group]) + len(reply)} tokens, the model "
                f"takes {context}; shorten prompts or sampling.max_new_tokens"
            )
