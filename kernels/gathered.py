"""How trunk keys and values come to a rank, and how their gradients go home: hop by hop round the ring, or all at once.

Both hand over the same blocks in the same order and add the same parts in the same order, so that their results are
bitwise equal. Round the ring a rank holds two blocks, the one in use and the one arriving; gathered, it holds all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from furlong.kernels.ring import Pending, Ring

Block = tuple[Tensor, Tensor]
"""Keys and values of one rank, or their gradients: each [rows kv_heads head_dim]."""


class Homeward(Protocol):
    """Gradients of every rank's keys and values, on their way to it. One use per backward pass."""

    def add(self, source: int, part: Block) -> None:
        """This rank's part for `source`; called for each rank of the ring, own first, then against the ring's turn."""

    def home(self) -> Block:
        """All ranks' parts for this rank's own keys and values: those of rank + 1, rank + 2, ..., and its own last."""


class RingHomeward:
    """A sum that follows its block round the ring: ranks - 1 hops, each under way while the next block is computed."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._own: Block | None = None
        self._coming: Pending | None = None

    def add(self, source: int, part: Block) -> None:
        if source == self._ring.rank:
            self._own = part
            return
        if self._coming is not None:
            part = _sum(self._coming.wait(), part)
        self._coming = self._ring.pass_on("gradient", part)

    def home(self) -> Block:
        return self._own if self._coming is None else _sum(self._coming.wait(), self._own)


class GatheredHomeward:
    """Every part sent straight to its owner, which adds them: a reduce-scatter with a fixed order of addition."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._own: Block | None = None
        self._coming: list[Pending] = []

    def add(self, source: int, part: Block) -> None:
        ring = self._ring
        if source == ring.rank:
            self._own = part
            return
        hop = (ring.rank - source) % ring.ranks
        self._coming.append(ring.swap("gradient", part, source, (ring.rank + hop) % ring.ranks))

    def home(self) -> Block:
        total = None
        for coming in self._coming:
            part = coming.wait()
            total = part if total is None else _sum(total, part)
        return self._own if total is None else _sum(total, self._own)


def ring_blocks(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, Block]]:
    """(rank, its keys and values), own first, then those of the rank before, and so on."""
    return ring.travel("kv", (key, value))


def gathered_blocks(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, Block]]:
    """The same, all of them under way at once."""
    hops = range(1, ring.ranks)
    coming = [
        ring.swap("kv", (key, value), (ring.rank + hop) % ring.ranks, (ring.rank - hop) % ring.ranks) for hop in hops
    ]
    yield ring.rank, (key, value)
    for hop, pending in zip(hops, coming, strict=True):
        yield (ring.rank - hop) % ring.ranks, pending.wait()


CARRIERS = {"ring": (ring_blocks, RingHomeward), "gather": (gathered_blocks, GatheredHomeward)}
"""By strategy: how blocks come, how gradients go home."""


def _sum(total: Block, part: Block) -> Block:
    for mine, more in zip(total, part, strict=True):
        mine.add_(more)
    return total
