"""A draft's states at every depth it is trained at, over rows that lie on one rank or on several.

EAGLE-3's test-time training: at depth d the anchor in row i reads token i + d and its own state of depth d - 1, is rotated
to position i + d - 1, and sees what a decoder's cache would hold after d - 1 proposals: keys of depth 1 up to row i, and its
own of depths 2 to d. It learns from the policy's distribution in row i + d. Gradients flow through all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.kernels.branch_attention import branch_attention
from furlong.kernels.branches import BranchLayout, block_draft, test_time_training
from furlong.kernels.context_parallel import cp_branch_attention
from furlong.kernels.halo import Halo, halo
from furlong.kernels.layout import NOBODY, ContextLayout
from furlong.kernels.ring import Ring
from furlong.kernels.shared_trunk import SharedTrunk
from furlong.ops.draft.block import BlockModule, block_anchors
from furlong.ops.draft.draft_loss import Pairs
from furlong.ops.draft.inputs import DraftInputs
from furlong.ops.draft.module import DraftModule, Eagle3Module

Passes = Callable[[Tensor, list[Tensor], list[Tensor], BranchLayout], Tensor]


@dataclass(frozen=True, eq=False)
class Unrolled:
    """States, and whom each learns from."""

    states: Float[Tensor, "states hidden"]
    """Of all anchors and depths, after the final norm."""
    teacher: Float[Tensor, "held hidden"]
    """The policy's, of this rank's rows and of those that follow them on other ranks."""
    pairs: Pairs


@dataclass(frozen=True)
class Place:
    """Where a rank's rows lie among others."""

    layout: ContextLayout
    ring: Ring
    backend: str
    """Of `kernels.backends`."""


def unroll(
    module: DraftModule, inputs: DraftInputs, depths: int, embedding: Float[Tensor, "vocab hidden"], place: Place
) -> Unrolled:
    """States of every depth, differentiable in the module's parameters; all ranks of the ring call it together.

    Args:
        inputs: of this rank, `place.layout.rows(place.ring.rank)`.
        depths: how far ahead; for a block, its proposals.
        embedding: the policy's, which gets no gradient.
    """
    block = isinstance(module, BlockModule)
    # The anchor's own row teaches a block's first proposal.
    width = depths - 1 if block else depths
    with torch.no_grad():
        # Of what follows, the policy's states and ids travel, once; never logits or embeddings.
        teacher = halo(inputs.final.detach(), place.layout, width, place.ring)
        learnt = halo(inputs.learnt, place.layout, width, place.ring)
        tokens = None if block else halo(inputs.tokens, place.layout, width, place.ring)
    padding = (inputs.rows.document == NOBODY)[:, None]
    feature = module.feature(inputs.taps.masked_fill(padding, 0.0))
    if block:
        states, pairs = _block(module, inputs, feature, learnt, embedding, place)
    else:
        states, pairs = _eagle3(module, inputs, feature, tokens, learnt, embedding, place)
    return Unrolled(module.normed(states), teacher.held, pairs)


def _eagle3(
    module: Eagle3Module, inputs: DraftInputs, feature: Tensor, tokens: Halo, learnt: Halo, embedding: Tensor,
    place: Place,
) -> tuple[Tensor, Pairs]:  # fmt: skip
    depths = learnt.width
    ahead = _teaches(learnt, range(1, depths + 1))
    # Keys of depth 1 are seen by later rows; all else only matters where something is learnt.
    own = ahead.any(1).nonzero().flatten()
    position, at = inputs.rows.position, module.LAYER
    x = module.inputs(_embedded(embedding, tokens.shift(1)), feature)
    passes = _passes(*module.keys(at, x, position), place)
    x, hidden, position = x[own], feature[own], position[own]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states = []
    for depth in range(depths):
        if depth:
            x = module.inputs(_embedded(embedding, tokens.shift(depth + 1)[own]), hidden)
            for held, new in zip((keys, values), module.keys(at, x, position + depth), strict=True):
                held.append(new)
        seen = test_time_training(inputs.rows, depth)
        branches = BranchLayout(seen.document[own], seen.cutoff[own], seen.sees)
        attend = partial(_one_query, passes, list(keys), list(values), branches)
        hidden = module.attended(at, x, hidden, position + depth, attend)
        states.append(hidden)
    return torch.cat(states), _pairs(learnt.at[own, 1:], ahead[own])


def _block(
    module: BlockModule, inputs: DraftInputs, feature: Tensor, learnt: Halo, embedding: Tensor, place: Place
) -> tuple[Tensor, Pairs]:
    size, rows = module.shape.block, inputs.rows
    ahead = _teaches(learnt, range(size - 1))
    anchors = block_anchors(rows, inputs.offsets, size - 1, ahead)
    branches = block_draft(rows, anchors, size, causal=False)

    def attend(q: Tensor, k_main: Tensor, v_main: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if place.ring.ranks == 1:
            return branch_attention(q, k_main, v_main, k, v, rows=rows, branches=branches, backend=place.backend)
        return cp_branch_attention(
            q, k_main, v_main, k, v, layout=place.layout, branches=branches, ring=place.ring, backend=place.backend
        )

    known = _embedded(embedding, inputs.tokens[anchors])
    hidden = module.states(feature, rows.position, known, rows.position[anchors], attend)
    return hidden[:, 1:].transpose(0, 1).flatten(0, 1), _pairs(learnt.at[anchors], ahead[anchors])


def _passes(k: Tensor, v: Tensor, place: Place) -> Passes:
    """Attention over the keys of depth 1 and a growing branch."""
    if place.ring.ranks == 1:
        rows = place.layout.rows(0)
        return lambda q, keys, values, branches: branch_attention(
            q, k, v, keys, values, rows=rows, branches=branches, backend=place.backend
        )
    trunk = SharedTrunk(k, v, layout=place.layout, ring=place.ring, backend=place.backend)
    return lambda q, keys, values, branches: trunk.attend(q, keys, values, branches=branches)


def _one_query(passes: Passes, keys: list[Tensor], values: list[Tensor], branches: BranchLayout, q: Tensor) -> Tensor:
    return passes(q[:, None], keys, values, branches)[:, 0]


def _teaches(learnt: Halo, offsets: range) -> Bool[Tensor, "rows offsets"]:
    """Whether the row so far ahead is there and followed by a token to learn."""
    return torch.stack([learnt.shift(offset, fill=False) for offset in offsets], 1)


def _pairs(at: Int[Tensor, "anchors depths"], on: Bool[Tensor, "anchors depths"]) -> Pairs:
    """Of states that lie depth after depth, those that learn, by teacher.

    Args:
        at: which held row teaches.
    """
    depth, anchor = on.t().nonzero(as_tuple=True)
    teacher = at.t()[depth, anchor]
    order = teacher.argsort(stable=True)
    return Pairs((depth * len(on) + anchor)[order], teacher[order], depth[order])


def _embedded(embedding: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, embedding.detach())
