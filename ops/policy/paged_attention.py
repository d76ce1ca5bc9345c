"""Attention of a step's tokens to their replies' pages, the same bits for a token whatever else the step computes.

Scores, exponentials and weighted values are computed page by page, which have one size, and combined in the order of
the pages (the online softmax of Milakov and Gimelshein 2018). Keys that a token does not see add exactly nothing. So
neither company nor the way a reply came to its length, token by token or in chunks, changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.ops.policy.kv_cache import PAGE, Held, KVCache, pages_of
from furlong.ops.policy.row_bits import ALIGNED, STEP, Product, by_rows, cancelling

WIDTH = 32
"""Tokens of a chunk that are attended with together."""
_LOWEST = -1e30
"""Stands for the largest score of a page of which a token sees nothing: finite, so that differences are."""


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
        if self._singles < len(spans):
            self._parts.append(_tiles_of_chunks(spans[self._singles :]))

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads d"],
        keys_values: Float[Tensor, "tokens two_kv_heads d"],
    ) -> Float[Tensor, "tokens heads_d"]:
        """Store the tokens' keys and values, then attend to everything up to each token; queries come scaled."""
        T, N, size = queries.shape
        if more := -size % ALIGNED:
            queries, keys_values = F.pad(queries, (0, more)), F.pad(keys_values, (0, more))
        K, D = keys_values.shape[1] // 2, size + more
        self._cache.write(layer, self._pages, self._offsets, keys_values.reshape(T, 2, K, D))
        folded = queries.reshape(T, K, N // K, D).split([tiles.tokens for tiles in self._parts])
        parts = [self._attend(layer, some, tiles) for some, tiles in zip(folded, self._parts, strict=True)]
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)
        return seen[..., :size].reshape(T, N * size)

    def _attend(
        self, layer: int, queries: Float[Tensor, "n kv_heads group d"], tiles: _Tiles
    ) -> Float[Tensor, "n kv_heads group d"]:
        _, K, G, D = queries.shape
        width = tiles.table.shape[1]
        rows = queries[tiles.table].transpose(1, 2).reshape(len(tiles.table), K, width * G, D)
        rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % STEP))
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        if tiles.pages is not None:
            keys, values = keys[tiles.pages], values[tiles.pages]
        hidden = tiles.hidden if width == 1 else tiles.hidden.repeat_interleave(G, dim=2)
        largest, total, seen = _weigh(rows[tiles.rows], keys, values, hidden)
        turns = [(largest[pages], total[pages], seen[pages]) for pages in tiles.turns]
        found = _combine(turns)[tiles.back].view(len(tiles.table), K, -1, D)[:, :, : width * G]
        return found.reshape(-1, K, width, G, D).transpose(1, 2).reshape(-1, K, G, D)[tiles.valid]


@dataclass(frozen=True)
class _Tiles:
    """Queries in tiles of one width, and for each tile the pages it sees."""

    tokens: int
    table: Int[Tensor, "tiles width"]
    """Which token each place of a tile is for; any, where a span has ended."""
    valid: Int[Tensor, " tokens"]
    """Where in the table each token is."""
    rows: Int[Tensor, " pairs"]
    """The tile of each pair of tile and page; any, for pages of other replies."""
    pages: Int[Tensor, " pairs"] | None
    """Its page; None when pairs are all pages in use, in their order."""
    hidden: Bool[Tensor, "pairs 1 width page"]
    turns: list[Int[Tensor, " some"]]
    """The pairs of all tiles' first pages, of the second pages of those that see any, ..., most pages first."""
    back: Int[Tensor, " tiles"]
    """Where each tile is in that order."""


def _tiles_of_singles(spans: list[Span], cache: KVCache) -> _Tiles:
    """A tile for each token, and pairs for all pages in use, as they are: those of other replies cost less than copying
    would, and nobody reads their results."""
    row_of = np.full(cache.most_slots, -1)
    row_of[[span.held.slot for span in spans]] = np.arange(len(spans))
    rows, ordinals = row_of[cache.slots[: cache.used]], cache.ordinals[: cache.used]
    table, positions = np.arange(len(spans))[:, None], np.array([[span.first] for span in spans])
    return _arranged(table, positions, table[:, 0], rows, ordinals, None)


def _tiles_of_chunks(spans: list[Span]) -> _Tiles:
    table, positions, rows, ordinals, pages, valid = [], [], [], [], [], []
    start = 0
    for span in spans:
        for at in range(0, span.count, WIDTH):
            count = min(WIDTH, span.count - at)
            place = np.minimum(np.arange(WIDTH), count - 1) + at
            valid.append(len(table) * WIDTH + np.arange(count))
            seen = pages_of(span.first + at + count)
            rows.append(np.full(seen, len(table)))
            ordinals.append(np.arange(seen))
            pages.append(span.held.pages[:seen])
            table.append(start + place)
            positions.append(span.first + place)
        start += span.count
    pairs = (np.concatenate(rows), np.concatenate(ordinals), np.concatenate(pages))
    return _arranged(np.stack(table), np.stack(positions), np.concatenate(valid), *pairs)


def _arranged(
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
    order = np.argsort(-counts, kind="stable")
    pair_of = np.zeros((len(table), int(counts.max())), dtype=np.int64)
    # A reply may hold a page beyond its length, when one was put by for its next token.
    mine = (rows >= 0) & (ordinals < counts[rows])
    pair_of[rows[mine], ordinals[mine]] = np.flatnonzero(mine)
    turns = [pair_of[order[: (counts > turn).sum()], turn] for turn in range(pair_of.shape[1])]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    last_seen = positions[np.maximum(rows, 0)] - ordinals[:, None] * PAGE
    return _Tiles(
        tokens=len(valid),
        table=torch.from_numpy(table),
        valid=torch.from_numpy(valid),
        rows=torch.from_numpy(np.maximum(rows, 0)),
        pages=None if pages is None else torch.from_numpy(pages),
        hidden=torch.from_numpy(np.arange(PAGE) > last_seen[..., None])[:, None],
        turns=[torch.from_numpy(turn) for turn in turns],
        back=torch.from_numpy(back),
    )


def _weigh(
    queries: Float[Tensor, "pairs kv_heads rows d"],
    keys: Float[Tensor, "pairs kv_heads page d"],
    values: Float[Tensor, "pairs kv_heads page d"],
    hidden: Bool[Tensor, "pairs 1 some_rows page"],
) -> tuple[Float[Tensor, "pairs all_rows"], Float[Tensor, "pairs all_rows"], Float[Tensor, "pairs all_rows d"]]:
    """For each page alone: the largest score, the sum of exp(score - largest), and the values weighted by that."""
    U, K, R, D = queries.shape
    k, v = keys.reshape(U * K, PAGE, D), values.reshape(U * K, PAGE, D)
    scores = _batched(queries.reshape(U * K, R, D), k.transpose(1, 2)).view(U, K, R, PAGE)
    scores = scores.masked_fill_(hidden, float("-inf")).view(U, K * R, PAGE)
    largest = scores.amax(dim=-1).clamp_(min=_LOWEST)
    shares = scores.sub_(largest[..., None]).exp_()
    total = shares.sum(dim=-1)
    seen = _batched(shares.view(U * K, R, PAGE), v).view(U, K * R, D)
    return largest, total, seen


def _combine(turns: list[tuple[Tensor, Tensor, Tensor]]) -> Float[Tensor, "all rows d"]:
    """Pages of each tile in their order; each turn is of the tiles that see that page, the first of those before."""
    if len(turns) == 1:
        _, total, seen = turns[0]
        return seen / total[..., None]
    top = turns[0][0].clone()
    for largest, _, _ in turns[1:]:
        some = top[: len(largest)]
        torch.maximum(some, largest, out=some)
    summed, weighted = torch.zeros_like(turns[0][1]), torch.zeros_like(turns[0][2])
    for largest, total, seen in turns:
        scale = (largest - top[: len(largest)]).exp_()
        summed[: len(largest)] += total * scale
        weighted[: len(largest)] += seen * scale[..., None]
    return weighted / summed[..., None]


def _batched(x: Float[Tensor, "batch rows n"], y: Float[Tensor, "batch n m"]) -> Float[Tensor, "batch rows m"]:
    kind = ("bmm", x.shape[2], y.shape[2], y.is_contiguous())
    return by_rows(lambda rows: torch.bmm(rows, y), x, kind, lambda rows: _probe(rows, y))


def _probe(rows: int, y: Tensor) -> tuple[Product, Tensor]:
    x, other = cancelling(rows, y.shape[2], y.shape[1], torch.float32)
    twin = other.expand(3, -1, -1).contiguous()
    twin = twin.transpose(1, 2) if not y.is_contiguous() else twin.transpose(1, 2).contiguous()
    return lambda some: torch.bmm(some, twin), x.expand(3, -1, -1)
