"""Which main keys the queries see, as rectangles: the plan that backends compute, and what it costs.

A query sees a prefix of its document's keys. With the queries of a document in order of their cutoffs that is a
staircase, which is cut into rectangles where everything is seen, squares under a causal diagonal, and small rectangles
with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from furlong.kernels.layout import NOBODY, Rows

WASTE = 0.04
"""Share of a document's pairs that may be computed for nothing, where its rectangles are not yet of GRANULE rows."""
GRANULE = 32
"""Rows of a rectangle at which cutting it further costs more in calls than it saves in pairs."""
SPAN = 4096
"""Rows and keys of a piece at most: bounds what a backend holds at once."""
STEPS = 8
"""A staircase of so few steps is cut into one full rectangle per step."""


@dataclass(frozen=True)
class Tile:
    """Queries and keys that meet, as rows of the plan's ordered queries and keys (`sorted_queries`, `sorted_keys`)."""

    queries: slice
    keys: slice
    kind: Literal["full", "causal", "masked"]
    """full: all see all. causal: a square; query i sees keys 0..i of it. masked: query i sees the first ends[i]."""
    ends: Int[Tensor, " queries"] | None = None
    """Of a masked tile: leading keys of the tile that each query sees; 1 or more, ascending."""

    @property
    def area(self) -> int:
        return (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)

    @property
    def pairs(self) -> int:
        """Pairs that are seen."""
        if self.kind == "causal":
            size = self.queries.stop - self.queries.start
            return size * (size + 1) // 2
        return self.area if self.ends is None else int(self.ends.sum())


@dataclass(frozen=True, eq=False)
class TrunkPlan:
    """Disjoint tiles that together are what the queries see. A query in no tile sees nothing."""

    queries: int
    keys: int
    order: Int[Tensor, " queries"] | None
    """Row of each query in the order of the tiles; None where they lie so already."""
    key_order: Int[Tensor, " keys"] | None
    tiles: tuple[Tile, ...]
    """As few as can be: a document under its own diagonal is one causal tile."""

    @cached_property
    def pairs(self) -> int:
        """Query-key pairs that are seen, per head."""
        return sum(tile.pairs for tile in self.tiles)

    @cached_property
    def pieces(self) -> tuple[Tile, ...]:
        """The tiles cut for backends that compute every piece's whole rectangle: at most SPAN by SPAN, and causal ones
        in halves until what their squares compute for nothing is below WASTE, or they have GRANULE rows."""
        return tuple(piece for tile in self.tiles for piece in _cut(tile))

    @cached_property
    def computed(self) -> int:
        """Pairs in the pieces' rectangles, per head. Within 5 % of `pairs` where documents have 640 tokens or more."""
        return sum(piece.area for piece in self.pieces)

    def sorted_queries(self, x: Shaped[Tensor, "queries ..."]) -> Shaped[Tensor, "queries ..."]:
        return x if self.order is None else x[self.order.to(x.device)]

    def unsorted_queries(self, x: Shaped[Tensor, "queries ..."]) -> Shaped[Tensor, "queries ..."]:
        return _put_back(x, self.order)

    def sorted_keys(self, x: Shaped[Tensor, "keys ..."]) -> Shaped[Tensor, "keys ..."]:
        return x if self.key_order is None else x[self.key_order.to(x.device)]

    def unsorted_keys(self, x: Shaped[Tensor, "keys ..."]) -> Shaped[Tensor, "keys ..."]:
        return _put_back(x, self.key_order)


def plan_trunk(document: Int[Tensor, " queries"], cutoff: Int[Tensor, " queries"], keys: Rows) -> TrunkPlan:
    """Plan for queries of any coordinates over keys of any coordinates: one rank's, or another's on its way round.

    Args:
        document: of each query; NOBODY sees nothing.
        cutoff: leading positions of its document that the query sees, in any order.
        keys: coordinates of the keys at hand, in any order; a document may have keys elsewhere too.
    Raises:
        ValueError: documents and cutoffs are not one integer each per query, or those of keys per key.
    """
    for name, of, at in (("query", document, cutoff), ("key", keys.document, keys.position)):
        if of.ndim != 1 or of.shape != at.shape or of.is_floating_point() or at.is_floating_point():
            raise ValueError(
                f"plan_trunk: documents {list(of.shape)} {of.dtype} and positions {list(at.shape)} {at.dtype} are not "
                f"one integer each per {name}; flatten them (BranchLayout.main_view does) and keep them integers"
            )
    key_document, key_order = keys.document.numpy(force=True), None
    position = keys.position.numpy(force=True)
    if not _in_order(key_document, position):
        key_order = np.lexsort((position, key_document))
        key_document, position = key_document[key_order], position[key_order]
    segments = {int(key_document[a]): slice(a, b) for a, b in _runs(key_document)}

    of, sees = document.numpy(force=True), cutoff.numpy(force=True)
    order = None
    if not _in_order(of, sees):
        order = np.lexsort((sees, of))
        of, sees = of[order], sees[order]
    tiles: list[Tile] = []
    for a, b in _runs(of):
        segment = segments.get(int(of[a]))
        if segment is not None:
            ends = np.searchsorted(position[segment], sees[a:b], side="left")
            tiles += _tiles(ends.astype(np.int64), a, segment.start)
    return TrunkPlan(
        len(of),
        len(position),
        None if order is None else torch.from_numpy(order),
        None if key_order is None else torch.from_numpy(key_order),
        tuple(tiles),
    )


def _put_back(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    back = torch.empty_like(x)
    back[order.to(x.device)] = x
    return back


def _runs(document: np.ndarray) -> Iterator[tuple[int, int]]:
    """(begin, end) of each stretch of one document, padding left out."""
    edges = np.flatnonzero(np.diff(document, prepend=NOBODY - 1, append=NOBODY - 1))
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if document[a] != NOBODY:
            yield a, b


def _in_order(document: np.ndarray, at: np.ndarray) -> bool:
    """Whether each document is one stretch, in which `at` ascends."""
    begins = [int(document[a]) for a, _ in _runs(document)]
    descends = (at[1:] < at[:-1]) & (document[1:] == document[:-1]) & (document[1:] != NOBODY)
    return len(set(begins)) == len(begins) and not descends.any()


def _tiles(ends: np.ndarray, query: int, key: int) -> list[Tile]:
    """Of queries from row `query` on, which see the first ends[i] keys from row `key` on; `ends` ascends."""
    unseen = int(np.searchsorted(ends, 0, side="right"))
    ends, query = ends[unseen:], query + unseen
    size = len(ends)
    if size == 0:
        return []
    steps = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist()]
    if len(steps) == size > 1 and ends[-1] - ends[0] == size - 1:
        square = Tile(slice(query, query + size), slice(key + int(ends[0]) - 1, key + int(ends[-1])), "causal")
        before = slice(key, square.keys.start)
        return [square] if before.start == before.stop else [Tile(square.queries, before, "full"), square]
    if len(steps) <= STEPS:
        levels = [0, *(int(ends[step]) for step in steps)]
        return [
            Tile(slice(query + step, query + size), slice(key + low, key + high), "full")
            for step, low, high in zip(steps, levels[:-1], levels[1:], strict=True)
        ]
    slack = max(WASTE * float(ends.sum()) / size, GRANULE / 2)
    return list(_staircase(ends, 0, size, 0, slack, query, key))


def _staircase(ends: np.ndarray, a: int, b: int, low: int, slack: float, query: int, key: int) -> Iterator[Tile]:
    """Tiles of queries a to b over keys from `low` on, of which `slack` pairs a query may be computed for nothing."""
    a += int(np.searchsorted(ends[a:b], low, side="right"))
    if a == b:
        return
    first, last = int(ends[a]), int(ends[b - 1])
    rows = slice(query + a, query + b)
    if first == last:
        yield Tile(rows, slice(key + low, key + last), "full")
    elif (b - a) * last - int(ends[a:b].sum()) <= slack * (b - a) and b - a <= SPAN and last - low <= SPAN:
        yield Tile(rows, slice(key + low, key + last), "masked", torch.from_numpy(ends[a:b] - low))
    elif first - low >= GRANULE:
        yield Tile(rows, slice(key + low, key + first), "full")
        yield from _staircase(ends, a, b, first, slack, query, key)
    else:
        half = _step_near(ends, a, b)
        yield from _staircase(ends, a, half, low, slack, query, key)
        yield from _staircase(ends, half, b, low, slack, query, key)


def _step_near(ends: np.ndarray, a: int, b: int) -> int:
    """Where the staircase rises, as near to the middle of a to b as can be."""
    middle = (a + b) // 2
    before = a + int(np.searchsorted(ends[a:b], ends[middle], side="left"))
    after = a + int(np.searchsorted(ends[a:b], ends[middle], side="right"))
    inside = [step for step in (before, after) if a < step < b]
    return min(inside, key=lambda step: abs(step - middle))


def _cut(tile: Tile) -> Iterator[Tile]:
    """See `TrunkPlan.pieces`."""
    if tile.kind == "causal":
        size = tile.queries.stop - tile.queries.start
        leaf = GRANULE
        while 2 * leaf <= WASTE * size:
            leaf *= 2
        yield from _halved(tile.queries.start, tile.keys.start, size, min(leaf, SPAN // 8))
    elif tile.kind == "full":
        for q in range(tile.queries.start, tile.queries.stop, SPAN):
            for k in range(tile.keys.start, tile.keys.stop, SPAN):
                rows = slice(q, min(q + SPAN, tile.queries.stop))
                yield Tile(rows, slice(k, min(k + SPAN, tile.keys.stop)), "full")
    else:
        yield tile


def _halved(query: int, key: int, size: int, leaf: int) -> Iterator[Tile]:
    if size <= leaf:
        yield Tile(slice(query, query + size), slice(key, key + size), "causal")
        return
    half = leaf * -(-size // (2 * leaf))
    yield from _halved(query, key, half, leaf)
    yield from _cut(Tile(slice(query + half, query + size), slice(key, key + half), "full"))
    yield from _halved(query + half, key + half, size - half, leaf)
