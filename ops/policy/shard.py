"""How a model is split over ranks (tensor parallelism), and the sums and gathers that make the parts one model again.

Megatron-LM's split (Shoeybi et al. 2019, section 3): q, k and v by heads, gate and up by rows, o and down by columns,
so that each attention and feed-forward block needs one sum over the ranks; embedding and head by vocabulary. Every rank
has a part of each expert and the whole router, so all choose the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.weights.layout import Piece

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")


class Exchange(Protocol):
    """Talks with the same code on the other ranks; `resources.weights.group.Group` is one."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        """Fill `parts`, one contiguous tensor per rank, all of one shape."""


class Whole:
    """One rank that holds everything: nothing to exchange."""

    def embed(self, tokens: Int[Tensor, " tokens"], table: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "tokens h"]:
        """Each token's row of the embedding, in float32."""
        return F.embedding(tokens, table).float()

    def total(self, partial: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The sum of all ranks' parts of one product."""
        return partial

    def complete(self, logits: Float[Tensor, "rows some"]) -> Float[Tensor, "rows vocab"]:
        """The logits of the whole vocabulary."""
        return logits


WHOLE = Whole()


class Shard:
    """One of several ranks. Every rank calls the same methods in the same order and gets the same bits back."""

    def __init__(self, whole: Architecture, rank: int, size: int, exchange: Exchange):
        self._exchange = exchange
        self._spans = [_span(whole.vocab, at, size) for at in range(size)]
        self._rank = rank

    def embed(self, tokens: Int[Tensor, " tokens"], table: Float[Tensor, "some hidden"]) -> Float[Tensor, "tokens h"]:
        """As in `Whole`, exactly: all ranks but one add zeros."""
        start, stop = self._spans[self._rank]
        mine = (tokens >= start) & (tokens < stop)
        rows = F.embedding((tokens - start).clamp(0, stop - start - 1), table).float()
        return self.total(torch.where(mine[:, None], rows, 0.0))

    def total(self, partial: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Summed in float32. Each part was rounded to the products' dtype first, as a whole product would have been."""
        wide = partial.float().contiguous()
        if len(self._spans) == 2:
            self._exchange.all_reduce(wide)
            return wide
        # Three numbers add up differently in another order, and a ring's order depends on where in the tensor they are.
        parts = [torch.empty_like(wide) for _ in self._spans]
        self._exchange.all_gather(parts, wide)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def complete(self, logits: Float[Tensor, "rows some"]) -> Float[Tensor, "rows vocab"]:
        """As in `Whole`; the spans differ by one token at most, so all ranks send the width of the longest."""
        widths = [stop - start for start, stop in self._spans]
        mine = F.pad(logits, (0, max(widths) - logits.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in widths]
        # As bytes, because not every exchange knows bfloat16.
        self._exchange.all_gather([part.view(torch.uint8) for part in parts], mine.view(torch.uint8))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def part_of(whole: Architecture, rank: int, size: int) -> Architecture:
    """The architecture of one rank's part."""
    start, stop = _span(whole.vocab, rank, size)
    return replace(
        whole,
        heads=whole.heads // size,
        kv_heads=whole.kv_heads // size,
        ffn=whole.ffn // size,
        expert_ffn=whole.expert_ffn // size,
        vocab=stop - start,
    )


def pieces(whole: Architecture, rank: int, size: int) -> dict[str, Piece]:
    """What one rank holds of each tensor, by Hugging Face name; norms and routers are whole on every rank."""
    found = {}
    for name, shape in whole.shapes().items():
        owner = name.split(".")[-2]
        dim = 1 if owner in _BY_COLUMNS else 0
        split = owner in _BY_COLUMNS or owner in _BY_ROWS
        found[name] = Piece(name, dim, *(_span(shape[dim], rank, size) if split else (0, shape[0])))
    return found


def _span(total: int, rank: int, size: int) -> tuple[int, int]:
    return total * rank // size, total * (rank + 1) // size
