"""A micro-batch as the engine would hold it: each token once, and the sequences that tokens belong to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from furlong.ops.policy.packing import MicroBatch

MOST_QUERIES = 256
"""Longest part of a sequence that is attended with at once; bounds the memory of scores."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence that no other segment computes, and all tokens before them."""

    path: Int[np.ndarray, " stop"]
    """Nodes of the sequence from its first token to the segment's last."""
    first: int
    """Position of the segment's first token."""
    sequence: int
    """Which of the sequences it is part of."""

    @property
    def count(self) -> int:
        return len(self.path) - self.first


@dataclass(frozen=True)
class Tree:
    """Tokens that some place depends on, padding left out. A node is one of them; nodes are in the order of segments,
    and segments of a single token come first."""

    tokens: Int[Tensor, " nodes"]
    positions: Int[Tensor, " nodes"]
    flat: Int[Tensor, " nodes"]
    """Index into the micro-batch's rows * width."""
    places: Int[Tensor, " places"]
    """The node of each place of the micro-batch."""
    segments: list[Segment]


def unpacked(micro: MicroBatch) -> Tree:
    """The tree of a micro-batch; one with nothing wanted becomes the first token alone, so that there is a forward."""
    rows, width = micro.tokens.shape
    parents = _parents(micro).reshape(-1)
    wanted = np.zeros(rows * width, bool)
    wanted[micro.places.numpy() if len(micro.places) else [0]] = True
    for at in np.arange(len(wanted))[::-1]:  # a parent stands before its children
        if wanted[at] and parents[at] >= 0:
            wanted[parents[at]] = True
    inner = np.zeros(len(wanted), bool)
    inner[parents[wanted & (parents >= 0)]] = True
    segments, order = _ordered(_sequences(np.flatnonzero(wanted & ~inner), parents))
    node_of = np.full(len(wanted), -1)
    node_of[order] = np.arange(len(order))
    flat = torch.from_numpy(order)
    return Tree(
        tokens=micro.tokens.flatten()[flat],
        positions=micro.positions.flatten()[flat],
        flat=flat,
        places=torch.from_numpy(node_of[micro.places.numpy()]),
        segments=[Segment(node_of[s.path], s.first, s.sequence) for s in segments],
    )


def _parents(micro: MicroBatch) -> Int[np.ndarray, "rows width"]:
    """Flat index of the token before each one in its sequence; -1 for a first one. In a row a token stands behind all
    that it sees, nearest last."""
    rows, width = micro.tokens.shape
    earlier = micro.visible[:, 0].numpy() & np.tri(width, k=-1, dtype=bool)
    nearest = width - 1 - earlier[:, :, ::-1].argmax(axis=2)
    flat = nearest + np.arange(rows)[:, None] * width
    return np.where(earlier.any(axis=2), flat, -1)


def _sequences(
    leaves: Int[np.ndarray, " leaves"], parents: Int[np.ndarray, " flat"]
) -> list[tuple[Int[np.ndarray, " length"], int]]:
    """Tokens from first to leaf, and the position of the first one that no earlier sequence holds."""
    taken, found = np.zeros(len(parents), bool), []
    for leaf in leaves:
        path = [int(leaf)]
        while parents[path[-1]] >= 0:
            path.append(int(parents[path[-1]]))
        nodes = np.array(path[::-1])
        found.append((nodes, int(taken[nodes].sum())))
        taken[nodes] = True
    return found


def _ordered(
    sequences: list[tuple[Int[np.ndarray, " length"], int]],
) -> tuple[list[Segment], Int[np.ndarray, " nodes"]]:
    segments = [
        Segment(path[: min(first + MOST_QUERIES, len(path))], first, index)
        for index, (path, start) in enumerate(sequences)
        for first in range(start, len(path), MOST_QUERIES)
    ]
    segments.sort(key=lambda segment: segment.count > 1)
    return segments, np.concatenate([segment.path[segment.first :] for segment in segments])
