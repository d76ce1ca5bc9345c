"""The block drafter (after DFlash): a block of tokens at once, every slot seeing all of its block and what came before it.

Slot 0 of a block is the last known token, its anchor; the others are masks, and slot s predicts the token at the anchor's
position + s. Keys and values of what came before are made of the policy's features, in every layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.kernels.layout import NOBODY, Rows
from furlong.ops.draft.module import DraftModule

AttendMain = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q, k and v of the main rows, k and v of the slots) -> [blocks slots heads head_dim]."""


class BlockModule(DraftModule):
    """Layers over blocks of slots."""

    def states(
        self, feature: Float[Tensor, "rows hidden"], position: Int[Tensor, " rows"],
        anchors: Float[Tensor, "blocks hidden"], at: Int[Tensor, " blocks"], attend: AttendMain,
    ) -> Float[Tensor, "blocks slots hidden"]:  # fmt: skip
        """The residual stream of every slot after the last layer, before the final norm.

        Args:
            feature: of the main rows, at their positions.
            anchors: the policy's embedding of the anchors' tokens, which gets no gradient.
            at: the anchors' positions.
        """
        feature = self._norm("hidden_norm", feature)
        masks = self.get_parameter("mask_embedding.weight").expand(len(at), self.shape.block - 1, -1)
        hidden = torch.cat([anchors.detach().to(masks.dtype)[:, None], masks], 1)
        slots = at[:, None] + torch.arange(self.shape.block, device=at.device)
        for layer in self.shape.layer_names():
            x = self._norm(f"{layer}input_layernorm", hidden)
            keys = *self.keys(layer, feature, position), *self.keys(layer, x, slots)
            hidden = self.attended(layer, x, hidden, slots, lambda q, keys=keys: attend(q, *keys))
        return hidden


def block_anchors(
    rows: Rows, offsets: Int[Tensor, " documents"], every: int, ahead: Bool[Tensor, "rows every"]
) -> Int[Tensor, " blocks"]:
    """Rows to hang blocks off: every `every`-th position of a document, where anything is to be learnt.

    Args:
        offsets: of the first anchor in each document.
        ahead: whether the teacher so many rows on teaches.
    """
    offset = offsets.to(rows.position.device)[rows.document.clamp(min=0)] if len(offsets) else rows.position
    chosen = (rows.document != NOBODY) & ((rows.position - offset) % every == 0)
    return (chosen & ahead.any(1)).nonzero().flatten()
