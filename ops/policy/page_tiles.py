"""Attention of tiles of queries to pages of keys and values: the arithmetic, whoever the queries and pages belong to.

Scores are computed page by page, which have one size; the largest of all of a token's scores is taken off, and weights
and weighted values are summed within each page, then in the order of the pages. Keys that a token does not see add
exactly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.kv_cache import PAGE
from furlong.ops.policy.row_bits import STEP, Product, alone, by_rows, cancelling

WIDTH, SHORT = 16, 4
"""Tiles of more than one token are filled up to a multiple of WIDTH, below it of SHORT, as a verified chain is a few tokens
long; those of one such width are attended with together."""
BLOCK = 64
"""Pages widened to float32 at a time, so that they are still in the processor's cache when they are multiplied with."""


def width_of(tokens: int) -> int:
    """Of a tile of so many tokens."""
    return tokens + -tokens % (SHORT if tokens < WIDTH else WIDTH)


@dataclass(frozen=True)
class Tiles:
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


def attend(
    queries: Float[Tensor, "tokens kv_heads group d"],
    keys: Float[Tensor, "pairs kv_heads page d"],
    values: Float[Tensor, "pairs kv_heads page d"],
    tiles: Tiles,
) -> Float[Tensor, "n kv_heads group d"]:
    """What each of the tiles' tokens sees.

    Args:
        queries: of all the step's tokens, scaled so that a score is the logarithm to base 2 of a weight.
        keys, values: the page of each pair.
    """
    _, K, G, D = queries.shape
    W = tiles.width
    if tiles.pages is None:
        rows = queries[: len(tiles.table)]
    else:
        rows = queries.index_select(0, tiles.table).view(-1, W, K, G, D).transpose(1, 2).reshape(-1, K, W * G, D)
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
    tiles: Tiles,
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


def _by_pages(terms: Float[Tensor, "pairs n"], tiles: Tiles) -> Float[Tensor, "tiles n"]:
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
