"""Attention of a step's tokens to their replies' pages, the same bits for a token whatever else the step computes.

Scores are computed page by page, which have one size; the largest of all of a token's scores is taken off, and weights
and weighted values are summed within each page, then in the order of the pages. Keys that a token does not see add
exactly nothing. So neither company nor the way a reply came to its length, token by token or in chunks, changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.kv_cache import PAGE, Held, KVCache, pages_of
from furlong.ops.policy.row_bits import ALIGNED, STEP, Product, alone, by_rows, cancelling

WIDTH = 16
"""Chunks are filled up to a multiple of this many tokens, and those of one such length are attended with together."""
BLOCK = 64
"""Pages widened to float32 at a time, so that they are still in the processor's cache when they are multiplied with."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one reply, fed in one step."""

    held: Held
    first: int
    """Position of the first one."""
    count: int


class Plan:
    """Where the tokens of one step go and what they see; the same for every layer.

    Tokens are in the order of the spans, those of a single token first.
    """

    def __init__(self, spans: list[Span], cache: KVCache):
        """Every span's pages must be there, and stay, until the step is over."""
        self._singles = sum(span.count == 1 for span in spans)
        if any(span.count == 1 for span in spans[self._singles :]):
            raise ValueError("spans of one token must come first; sort them")
        self._cache = cache
        at = np.concatenate([np.arange(span.first, span.first + span.count) for span in spans])
        pages = np.concatenate([
            np.asarray(span.held.pages)[np.arange(span.first, span.first + span.count) // PAGE] for span in spans
        ])  # fmt: skip
        self.positions = torch.from_numpy(at)
        self._pages, self._offsets = torch.from_numpy(pages), torch.from_numpy(at % PAGE)
        self._parts = []
        if self._singles:
            self._parts.append(_tiles_of_singles(spans[: self._singles], cache))
        chunks = spans[self._singles :]
        starts = np.cumsum([self._singles, *(span.count for span in chunks)])
        lengths = np.array([span.count + -span.count % WIDTH for span in chunks])
        for length in np.unique(lengths).tolist():
            mine = np.flatnonzero(lengths == length).tolist()
            self._parts.append(_tiles_of_chunks([chunks[i] for i in mine], starts[mine], length))
        self._back = None
        if len(self._parts) > 1:
            self._back = torch.from_numpy(np.argsort(np.concatenate([tiles.tokens for tiles in self._parts])))

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads d"],
        keys_values: Float[Tensor, "tokens two_kv_heads d"],
    ) -> Float[Tensor, "tokens heads_d"]:
        """Store the tokens' keys and values, then attend to everything up to each token.

        Args:
            queries: scaled, so that a score is the logarithm to base 2 of a weight.
        """
        T, N, size = queries.shape
        if more := -size % ALIGNED:
            queries, keys_values = F.pad(queries, (0, more)), F.pad(keys_values, (0, more))
        K, D = keys_values.shape[1] // 2, size + more
        self._cache.write(layer, self._pages, self._offsets, keys_values.view(T, 2, K, D))
        queries = queries.view(T, K, N // K, D)
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        parts = [_attend(queries, keys, values, tiles) for tiles in self._parts]
        seen = parts[0] if self._back is None else torch.cat(parts).index_select(0, self._back)
        return seen[..., :size].reshape(T, N * size)


@dataclass(frozen=True)
class _Tiles:
    """Queries in tiles of one width, and for each tile the pages it sees."""

    tokens: Int[np.ndarray, " tokens"]
    """Which of the step's tokens these are."""
    table: Int[Tensor, " places"]
    """Which token each place of the tiles is for; any, where a span has ended."""
    valid: Int[Tensor, " tokens"]
    """Which place each token has."""
    width: int
    """Places per tile."""
    rows: Int[Tensor, " pairs"]
    """The tile of each pair of tile and page; any, for pages of other replies."""
    pages: Int[Tensor, " pairs"] | None
    """Its page; None when pairs are all pages in use, in their order."""
    hidden: Float[Tensor, "pairs 1 width page"]
    """What is added to scores: 0, and -infinity where a key comes after the query."""
    bags: Int[Tensor, " seen_pairs"]
    """The pairs of each tile in the order of their pages, tile after tile."""
    starts: Int[Tensor, " tiles"]
    """Where those of each tile begin."""
    grid: Int[Tensor, " tiles_most"] | None
    """As many pairs of each tile as the largest has, some repeated; None when all have one."""


def _tiles_of_singles(spans: list[Span], cache: KVCache) -> _Tiles:
    """A tile for each token, and pairs for all pages in use, as they are: those of other replies cost less than copying
    would, and nobody reads their results."""
    row_of = np.full(cache.most_slots, -1)
    row_of[[span.held.slot for span in spans]] = np.arange(len(spans))
    rows, ordinals = row_of[cache.slots[: cache.used]], cache.ordinals[: cache.used]
    tokens = np.arange(len(spans))
    return _arranged(tokens, tokens[:, None], np.array([[span.first] for span in spans]), tokens, rows, ordinals, None)


def _tiles_of_chunks(spans: list[Span], starts: Int[np.ndarray, " spans"], width: int) -> _Tiles:
    """A tile for each span.

    Args:
        starts: which of the step's tokens each span begins with.
    """
    counts = np.array([span.count for span in spans])
    place = np.minimum(np.arange(width), counts[:, None] - 1)
    seen = [pages_of(span.first + span.count) for span in spans]
    return _arranged(
        tokens=np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)]),
        table=starts[:, None] + place,
        positions=np.array([span.first for span in spans])[:, None] + place,
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
) -> _Tiles:
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
    return _Tiles(
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


def _attend(
    queries: Float[Tensor, "tokens kv_heads group d"],
    keys: Float[Tensor, "used kv_heads page d"],
    values: Float[Tensor, "used kv_heads page d"],
    tiles: _Tiles,
) -> Float[Tensor, "n kv_heads group d"]:
    _, K, G, D = queries.shape
    W = tiles.width
    if tiles.pages is None:
        rows = queries[: len(tiles.table)]
    else:
        rows = queries.index_select(0, tiles.table).view(-1, W, K, G, D).transpose(1, 2).reshape(-1, K, W * G, D)
        keys, values = keys.index_select(0, tiles.pages), values.index_select(0, tiles.pages)
    rows = F.pad(rows, (0, 0, 0, -W * G % STEP))
    hidden = tiles.hidden if W == 1 else tiles.hidden.repeat_interleave(G, dim=2)
    seen = weighted(rows, keys, values, hidden, tiles)[:, :, : W * G]
    if tiles.pages is None:
        return seen
    return seen.view(-1, K, W, G, D).transpose(1, 2).reshape(-1, K, G, D).index_select(0, tiles.valid)


def weighted(
    queries: Float[Tensor, "tiles kv_heads rows d"],
    keys: Float[Tensor, "pairs kv_heads page d"],
    values: Float[Tensor, "pairs kv_heads page d"],
    hidden: Float[Tensor, "pairs 1 some_rows page"],
    tiles: _Tiles,
) -> Float[Tensor, "tiles kv_heads rows d"]:
    """sum_i 2^(s_i - max s) v_i / sum_i 2^(s_i - max s): both sums within each page, then page after page."""
    U, K, _, D = keys.shape
    R = queries.shape[2]
    spread = queries.flatten(1).index_select(0, tiles.rows).view(U * K, R, D)
    scores = _times(spread, keys, turned=True).view(U, K, R, PAGE)
    scores = scores.add_(hidden).view(U, K * R, PAGE)
    largest = scores.amax(dim=-1)
    if tiles.grid is not None:
        largest = largest.index_select(0, tiles.grid).view(len(queries), -1, K * R).amax(dim=1)
        largest = largest.index_select(0, tiles.rows)
    shares = alone(scores.sub_(largest[..., None]).exp2_)
    total = _by_pages(shares.sum(dim=-1), tiles)
    seen = _times(shares.view(U * K, R, PAGE), values, turned=False)
    seen = _by_pages(seen.view(U, K * R * D), tiles)
    return seen.view(-1, K * R, D).div_(total[..., None]).view(-1, K, R, D)


def _by_pages(terms: Float[Tensor, "pairs n"], tiles: _Tiles) -> Float[Tensor, "tiles n"]:
    """The sum over each tile's pages, from the first to the last one."""
    return torch.embedding_bag(terms, tiles.bags, tiles.starts)[0]


def _times(
    x: Float[Tensor, "pairs_kv_heads rows n"], pages: Float[Tensor, "pairs kv_heads page d"], turned: bool
) -> Float[Tensor, "pairs_kv_heads rows m"]:
    """x times each page's keys or values, in float32; transposed when `turned`."""
    terms, columns = pages.shape[:1:-1] if turned else pages.shape[2:]
    kind = ("pages", terms, columns, turned)
    return by_rows(
        lambda rows: _product(rows, pages, turned), x, kind, lambda rows: _probe(rows, terms, columns, turned)
    )


def _product(x: Tensor, pages: Tensor, turned: bool) -> Tensor:
    U, K, P, D = pages.shape
    if pages.dtype == torch.float32:
        whole = pages.view(U * K, P, D)
        return torch.bmm(x, whole.transpose(1, 2) if turned else whole)
    found = x.new_empty((U * K, x.shape[1], P if turned else D))
    wide = x.new_empty((min(U, BLOCK) * K, P, D))
    for at in range(0, U, BLOCK):
        some = slice(at * K, min(at + BLOCK, U) * K)
        block = wide[: some.stop - some.start]
        # Memory, not arithmetic, is what this waits for.
        alone(partial(block.copy_, pages[at : at + BLOCK].view(-1, P, D)))
        torch.bmm(x[some], block.transpose(1, 2) if turned else block, out=found[some])
    return found


def _probe(rows: int, terms: int, columns: int, turned: bool) -> tuple[Product, Tensor]:
    x, other = cancelling(rows, columns, terms, torch.float32)
    pages = (other if turned else other.T.contiguous()).expand(1, 3, -1, -1).contiguous()
    return lambda some: _product(some, pages, turned), x.expand(3, -1, -1)
