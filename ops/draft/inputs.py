"""What a draft learns from in one micro-batch: rows of documents with the policy's states at them.

Everything is indexed by row. Row j's own teacher is the policy's distribution after token j, and `trained` says of row j
whether the token that follows it is to be learnt, so that the last token of a document, which is predicted and never fed,
needs no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.kernels.layout import NOBODY, ContextLayout, Rows
from furlong.ops.draft.shape import DraftShape
from furlong.ops.identity import counter_seed


class DraftInputError(ValueError):
    """A micro-batch that a draft cannot learn from; the message says why and what to give."""


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """One rank's rows of one micro-batch. Nothing here gets a gradient."""

    rows: Rows
    """Document and position of each row. On one rank, every document has each position from 0 once, in any order."""
    tokens: Int[Tensor, " rows"]
    """The policy's token ids, any at padding."""
    taps: Float[Tensor, "rows taps_hidden"]
    """The residual stream after each tapped layer, ascending, side by side."""
    final: Float[Tensor, "rows hidden"]
    """The policy's last hidden state after its final norm: what its head reads."""
    trained: Bool[Tensor, " rows"]
    """Whether the token that follows the row is a drawn one to learn; false at padding."""
    temperature: float
    """Of the rollout: both distributions are softmax(logits / temperature)."""
    offsets: Int[Tensor, " documents"] | None = None
    """Of a block drafter's anchors in each document; see `anchor_offsets`."""

    def check(self, shape: DraftShape) -> None:
        """DraftInputError unless everything is of as many rows and of the draft's sizes."""
        count = len(self.rows.document)
        given = {"rows.position": self.rows.position, "tokens": self.tokens, "trained": self.trained}
        wanted = dict.fromkeys(given, (count,))
        given |= {"taps": self.taps, "final": self.final}
        wanted |= {"taps": (count, len(shape.taps) * shape.hidden), "final": (count, shape.hidden)}
        for name, tensor in given.items():
            if tuple(tensor.shape) != wanted[name]:
                raise DraftInputError(
                    f"draft: {name} is {tuple(tensor.shape)} where {wanted[name]} was expected, for {count} rows, "
                    f"{len(shape.taps)} taps and a hidden size of {shape.hidden}; give every row once"
                )
        if self.trained.dtype != torch.bool:
            raise DraftInputError(f"draft: trained is {self.trained.dtype}; give a boolean per row")
        if not 0 < self.temperature < float("inf"):
            raise DraftInputError(
                f"draft: temperature {self.temperature} gives no distribution to learn; give the rollout's, above 0"
            )
        documents = int(self.rows.document.max()) + 1 if count else 0
        if shape.kind == "block" and (self.offsets is None or len(self.offsets) < documents):
            raise DraftInputError(
                f"draft: a block drafter hangs blocks off {documents} documents, whose offsets are missing; give those "
                "of anchor_offsets, one per document"
            )

    @property
    def learnt(self) -> Bool[Tensor, " rows"]:
        """`trained`, for certain without padding."""
        return self.trained & (self.rows.document != NOBODY)


def depths_of(shape: DraftShape, depths: int) -> int:
    """How many tokens ahead a draft is trained: `depths`, or all of a block."""
    return shape.block - 1 if shape.kind == "block" else depths


def anchor_offsets(seed: int, step: int, documents: Sequence[int | str], every: int) -> Int[Tensor, " documents"]:
    """Where each document's first anchor lies, uniformly from 0 to every - 1; the others follow `every` positions apart.

    A function of its arguments: the same on all ranks however documents are packed, and of no global random state. So
    every token is as likely at every slot of a block, and with `every` = a block's proposals each is learnt once a step.

    Args:
        documents: what identifies each in the step, such as its trajectory's id.
    """
    keys = (counter_seed("draft", "anchors", seed, step, document) for document in documents)
    drawn = [int(np.random.Generator(np.random.Philox(key=key)).integers(every)) for key in keys]
    return torch.tensor(drawn, dtype=torch.int64)


def local_counts(inputs: DraftInputs, shape: DraftShape, depths: int) -> Int[Tensor, " depths"]:
    """How many tokens each depth learns whose teacher lies in these rows. Add up over micro-batches, DP and CP.

    Counted where the teacher lies, which needs no message; the rank of the anchor may be another one, so that only the
    sum over the ranks of a context-parallel group means something.

    Args:
        depths: of the settings; a block has its own.
    """
    position, ahead = inputs.rows.position, torch.arange(depths_of(shape, depths), device=inputs.tokens.device)
    if shape.kind == "block":
        anchor = position[:, None] - ahead
        offset = inputs.offsets.to(position.device)[inputs.rows.document.clamp(min=0)] if len(position) else position
        there = (anchor >= 0) & ((anchor - offset[:, None]) % (shape.block - 1) == 0)
    else:
        there = position[:, None] >= ahead + 1
    return (there & inputs.learnt[:, None]).sum(0).cpu()


def one_rank(rows: Rows) -> ContextLayout:
    """The layout of documents that all lie on one rank, as they lie.

    Raises:
        DraftInputError: a document lacks a position or has it twice.
    """
    real = rows.document != NOBODY
    document, position = rows.document[real], rows.position[real]
    lengths = torch.bincount(document) if len(document) else document.new_zeros(0)
    token = (lengths.cumsum(0) - lengths)[document] + position
    if bool((position < 0).any() or (position >= lengths[document]).any()) or len(token.unique()) != len(token):
        raise DraftInputError(
            "draft: a document lacks a position or has one twice; give each document's rows once, from position 0 on"
        )
    source = torch.arange(len(real), device=real.device)
    return ContextLayout(
        tuple(lengths.tolist()), source[None], rows.document[None], torch.where(real, rows.position, 0)[None]
    )
