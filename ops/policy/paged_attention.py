"""Attention of a step's tokens to their replies' pages, the same bits for a token whatever else the step computes.

Scores are computed page by page, which have one size; the largest of all of a token's scores is taken off, and weights
and weighted values are summed within each page, then in the order of the pages. Keys that a token does not see add
exactly nothing. So neither company nor the way a reply came to its length, token by token or in chunks, changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.kv_cache import PAGE, Held, KVCache, pages_of
from furlong.ops.policy.page_tiles import Tiles, attend, width_of
from furlong.ops.policy.row_bits import ALIGNED
from furlong.ops.policy.tree_attention import Tree, TreePart


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one reply, fed in one step."""

    held: Held
    first: int
    """Position of the first one."""
    count: int
    whole: bool = False
    """Whether its tokens see each other, later ones too; of two or more."""


class Plan:
    """Where the tokens of one step go and what they see; the same for every layer.

    Tokens are in the order of the spans, those of a single token first, then in that of the trees.
    """

    def __init__(self, spans: list[Span], cache: KVCache, trees: Sequence[Tree] = ()):
        """Every span's and tree's pages must be there, and stay, until the step is over.

        Args:
            trees: whose nodes that were not fed yet are fed now; see `tree_attention.keep` for what to do afterwards.
        Raises:
            ValueError: a span of one token after longer ones, or a tree without new nodes.
        """
        self._singles = sum(span.count == 1 for span in spans)
        if any(span.count == 1 for span in spans[self._singles :]):
            raise ValueError("spans of one token must come first; sort them")
        if any(not tree.count for tree in trees):
            raise ValueError("a tree has no nodes that were not fed; add some, or leave it out")
        self._cache = cache
        starts = np.cumsum([0, *(span.count for span in spans), *(tree.count for tree in trees)])
        spanned = int(starts[len(spans)])
        owner = np.repeat(np.arange(len(spans)), [span.count for span in spans])
        at = np.array([span.first for span in spans], dtype=np.int64)[owner] + np.arange(spanned) - starts[owner]
        pages = [spans[i].held.pages[ordinal] for i, ordinal in zip(owner.tolist(), (at // PAGE).tolist(), strict=True)]
        later = [tree.first + depth for tree in trees for depth in tree.depths[tree.fed :]]
        self.positions = torch.from_numpy(np.concatenate([at, np.array(later, dtype=np.int64)]))
        self._pages, self._offsets = torch.tensor(pages, dtype=torch.int64), torch.from_numpy(at % PAGE)
        self._parts: list[Tiles | TreePart] = []
        if self._singles:
            self._parts.append(_tiles_of_singles(spans[: self._singles], cache))
        chunks = spans[self._singles :]
        for width, mine in _by_width([span.count for span in chunks]):
            firsts = starts[self._singles : len(spans)][mine]
            self._parts.append(_tiles_of_chunks([chunks[i] for i in mine], firsts, width))
        for _, mine in _by_width([tree.count for tree in trees]):
            self._parts.append(TreePart([trees[i] for i in mine], starts[len(spans) : -1][mine], cache))
        self._back = None
        if len(self._parts) > 1:
            tokens = [part.tiles.tokens if isinstance(part, TreePart) else part.tokens for part in self._parts]
            self._back = torch.from_numpy(np.argsort(np.concatenate(tokens)))

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads d"],
        keys_values: Float[Tensor, "tokens two_kv_heads d"],
    ) -> Float[Tensor, "tokens heads_d"]:
        """Store the tokens' keys and values, trees' with the trees, then attend to everything up to each token.

        Args:
            queries: scaled, so that a score is the logarithm to base 2 of a weight.
        """
        T, N, size = queries.shape
        if more := -size % ALIGNED:
            queries, keys_values = F.pad(queries, (0, more)), F.pad(keys_values, (0, more))
        K, D = keys_values.shape[1] // 2, size + more
        rows = keys_values.view(T, 2, K, D)
        self._cache.write(layer, self._pages, self._offsets, rows[: len(self._pages)])
        queries = queries.view(T, K, N // K, D)
        parts = [self._seen(part, layer, queries, rows) for part in self._parts]
        seen = parts[0] if self._back is None else torch.cat(parts).index_select(0, self._back)
        return seen[..., :size].reshape(T, N * size)

    def _seen(self, part: Tiles | TreePart, layer: int, queries: Tensor, rows: Tensor) -> Tensor:
        if isinstance(part, TreePart):
            return part.attend(layer, queries, rows)
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        if part.pages is not None:
            keys, values = keys.index_select(0, part.pages), values.index_select(0, part.pages)
        return attend(queries, keys, values, part)


def _by_width(counts: list[int]) -> list[tuple[int, list[int]]]:
    """Which of the counts are filled up to each width."""
    widths = np.array([width_of(count) for count in counts], dtype=np.int64)
    return [(int(width), np.flatnonzero(widths == width).tolist()) for width in np.unique(widths)]


def _tiles_of_singles(spans: list[Span], cache: KVCache) -> Tiles:
    """A tile for each token, and pairs for all pages in use, as they are: those of other replies cost less than copying
    would, and nobody reads their results."""
    row_of = np.full(cache.most_slots, -1)
    row_of[[span.held.slot for span in spans]] = np.arange(len(spans))
    rows, ordinals = row_of[cache.slots[: cache.used]], cache.ordinals[: cache.used]
    tokens = np.arange(len(spans))
    return _arranged(tokens, tokens[:, None], np.array([[span.first] for span in spans]), tokens, rows, ordinals, None)


def _tiles_of_chunks(spans: list[Span], starts: Int[np.ndarray, " spans"], width: int) -> Tiles:
    """A tile for each span.

    Args:
        starts: which of the step's tokens each span begins with.
    """
    counts = np.array([span.count for span in spans])
    place = np.minimum(np.arange(width), counts[:, None] - 1)
    whole = np.array([span.whole for span in spans])[:, None]
    seen = [pages_of(span.first + span.count) for span in spans]
    return _arranged(
        tokens=np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)]),
        table=starts[:, None] + place,
        positions=np.array([span.first for span in spans])[:, None] + np.where(whole, counts[:, None] - 1, place),
        valid=np.concatenate([at * width + np.arange(count) for at, count in enumerate(counts)]),
        rows=np.repeat(np.arange(len(spans)), seen),
        ordinals=np.concatenate([np.arange(some) for some in seen]),
        pages=np.concatenate([span.held.pages[:some] for span, some in zip(spans, seen, strict=True)]),
    )


def _arranged(
    tokens: Int[np.ndarray, " tokens"],
    table: Int[np.ndarray, "tiles width"],
    positions: Int[np.ndarray, "tiles width"],
    valid: Int[np.ndarray, " tokens"],
    rows: Int[np.ndarray, " pairs"],
    ordinals: Int[np.ndarray, " pairs"],
    pages: Int[np.ndarray, " pairs"] | None,
) -> Tiles:
    """
    Args:
        positions: of the tokens in the table; rows: the tile of each pair, -1 for none; ordinals: of its page.
    """
    counts = positions.max(axis=1) // PAGE + 1
    most = int(counts.max())
    pair_of = np.zeros((len(table), most), dtype=np.int64)
    # A reply may hold a page beyond its length, when one was put by for its next token.
    mine = (rows >= 0) & (ordinals < counts[rows])
    pair_of[rows[mine], ordinals[mine]] = np.flatnonzero(mine)
    there = np.arange(most) < counts[:, None]
    last_seen = positions[np.maximum(rows, 0)] - ordinals[:, None] * PAGE
    hidden = np.where(np.arange(PAGE) > last_seen[..., None], np.float32(-np.inf), np.float32(0.0))
    return Tiles(
        tokens=tokens,
        table=torch.from_numpy(table.ravel()),
        valid=torch.from_numpy(valid),
        width=table.shape[1],
        rows=torch.from_numpy(np.maximum(rows, 0)),
        pages=None if pages is None else torch.from_numpy(pages),
        hidden=torch.from_numpy(hidden)[:, None],
        bags=torch.from_numpy(pair_of[there]),
        starts=torch.from_numpy(np.cumsum(counts) - counts),
        grid=torch.from_numpy(np.where(there, pair_of, pair_of[:, :1]).ravel()) if most > 1 else None,
    )
