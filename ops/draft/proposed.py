"""What a draft proposed for the replies of a batch: for each a chain or a tree of tokens after its last one.

Its small tables are numpy arrays, whose operations take a fraction of the time that tensors' take to begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Proposed:
    """Trees of b replies, filled up to one number of nodes. Node 0 is the reply's last token, which is no proposal.

    Raises:
        ValueError: a node does not come after its parent, or its parent is not there.
    """

    tokens: Int[Tensor, "b nodes"]
    """Ids in the policy's vocabulary; node 0's, and those of nodes that are not there, are not looked at."""
    parents: Int[Tensor, "b nodes"]
    """The node that each one comes after; -1 for node 0, and for nodes that are not there."""

    def __post_init__(self) -> None:
        above = self.above
        fits = above.shape == tuple(self.tokens.shape) and above.shape[1] > 0 and (above[:, 0] < 0).all()
        if fits:
            late = above >= np.arange(above.shape[1])
            orphan = (above > 0) & (np.take_along_axis(above, above.clip(0, above.shape[1] - 1), 1) < 0)
            fits = not (late | orphan).any()
        if not fits:
            raise ValueError(
                f"parents {self.parents.tolist()[:3]} are no trees of the {tuple(self.tokens.shape)} tokens: node 0 has "
                "-1, and each other one an earlier node that is there; pass them in that order"
            )

    @staticmethod
    def chains(tokens: Int[Tensor, "b k"], counts: Int[Tensor, " b"] | None = None) -> Proposed:
        """Each reply's first `counts` tokens, all of them if None, one after the other."""
        b, k = tokens.shape
        parents = torch.arange(-1, k).expand(b, -1)
        if counts is not None:
            parents = torch.where(torch.arange(k + 1) <= counts[:, None], parents, -1)
        return Proposed(torch.cat([torch.full((b, 1), -1), tokens], dim=1), parents)

    @property
    def ids(self) -> Int[np.ndarray, "b nodes"]:
        """The tokens."""
        return self.tokens.numpy()

    @cached_property
    def above(self) -> Int[np.ndarray, "b nodes"]:
        """The parents."""
        return np.ascontiguousarray(self.parents.numpy())

    @cached_property
    def there(self) -> Bool[np.ndarray, "b nodes"]:
        return (self.above >= 0) | (np.arange(self.above.shape[1]) == 0)

    @cached_property
    def rows(self) -> Int[np.ndarray, "b nodes"]:
        """Place of each node among all that are there, reply after reply; any for the others."""
        return self.there.cumsum().reshape(self.there.shape) - 1

    @cached_property
    def owners(self) -> Int[np.ndarray, " rows"]:
        """The reply of each row."""
        return np.repeat(np.arange(len(self.there)), self.there.sum(axis=1))

    @cached_property
    def depths(self) -> Int[np.ndarray, "b nodes"]:
        """Tokens between each node and node 0, itself included."""
        depths, replies = np.zeros_like(self.above), np.arange(len(self.above))
        for node in range(1, depths.shape[1]):
            above = self.above[:, node]
            depths[:, node] = np.where(above >= 0, depths[replies, above] + 1, 0)
        return depths

    @cached_property
    def depth(self) -> int:
        """Most tokens that can be accepted."""
        return int(self.depths.max())

    @cached_property
    def children(self) -> Int[np.ndarray, "b nodes width"]:
        """Of each node in their order, -1 where there are fewer; width is that of the widest, at least 1."""
        b, nodes = self.above.shape
        children, counts = np.full((b, nodes, max(1, nodes - 1)), -1), np.zeros((b, nodes), dtype=np.int64)
        for node in range(1, nodes):
            replies = np.flatnonzero(self.there[:, node])
            above = self.above[replies, node]
            children[replies, above, counts[replies, above]] = node
            counts[replies, above] += 1
        return children[..., : max(1, int(counts.max()))]

    @property
    def width(self) -> int:
        return self.children.shape[2]


@dataclass(frozen=True)
class Drafted:
    """The distributions that proposals were drawn from, all children of a node independently from the same one."""

    chances: Float[Tensor, "laws blocks n"]
    """As `Laws.chances`, over the draft's vocabulary; their sum is divided by."""
    rows: Int[Tensor, "b nodes"]
    """Which of them each node's children were drawn from; -1 for nodes without."""
    ids: Int[Tensor, " draft_vocab"] | None = None
    """Each draft token's id in the policy's vocabulary; None when they are the same."""

    @staticmethod
    def chains(chances: Float[Tensor, "b k blocks n"], ids: Int[Tensor, " draft_vocab"] | None = None) -> Drafted:
        """Of `Proposed.chains`: the j-th proposal was drawn from chances[:, j]."""
        b, k = chances.shape[:2]
        rows = torch.cat([torch.arange(b * k).view(b, k), torch.full((b, 1), -1)], dim=1)
        return Drafted(chances.flatten(0, 1), rows, ids)

    @cached_property
    def mass(self) -> Float[Tensor, " laws"]:
        return self.chances.sum(dim=-1).double().sum(dim=-1)

    @cached_property
    def usable(self) -> Bool[np.ndarray, " laws"]:
        """Whether each is a distribution at all."""
        return (self.mass.isfinite() & (self.mass > 0)).numpy()

    @cached_property
    def _places(self) -> Int[np.ndarray, " ids"]:
        """Of each of the policy's ids in the draft's vocabulary, -1 for none; ids beyond the last have none."""
        places = np.full(int(self.ids.max()) + 1, -1)
        places[self.ids.numpy()] = np.arange(len(self.ids))
        return places

    def of(self, laws: Int[np.ndarray, " r"], tokens: Int[np.ndarray, " r"]) -> Float[np.ndarray, " r"]:
        """Each token's probability (float64); 0 where the draft cannot propose it."""
        if self.ids is not None:
            known = tokens < len(self._places)
            tokens = np.where(known, self._places[np.where(known, tokens, 0)], -1)
        found = self.chances.flatten(1).numpy()[laws, tokens.clip(0)] / self.mass.numpy()[laws]
        return np.where(tokens >= 0, found, 0.0)

    def whole(self, laws: Int[np.ndarray, " r"], vocabulary: int) -> Float[Tensor, "r vocab"]:
        """Probabilities (float64) over the policy's vocabulary, filled up with zeros to this many."""
        at = torch.from_numpy(laws)
        found = self.chances.flatten(1)[at].double() / self.mass[at][:, None]
        if self.ids is None:
            return found
        spread = found.new_zeros((len(laws), vocabulary))
        spread[:, self.ids] = found[:, : len(self.ids)]
        return spread
