"""Trees of proposed tokens after a reply's last one: each node sees the reply's earlier tokens and its own ancestors only.

A token's attention has the same bits only where its keys lie at the same places of pages (`paged_attention`), and two
nodes of one depth have one place. So every path from the root to a leaf gets copies of the pages that it ends in, with the
path's own keys and values in their places; the whole pages before are the reply's own. A node's result is thus, bit for
bit, that of feeding its path alone, token by token: what other paths add is exactly nothing.

Nothing of a tree is in the cache until `keep` puts an accepted path there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.kv_cache import PAGE, Held, KVCache
from furlong.ops.policy.page_tiles import Tiles, attend, width_of


class Tree:
    """Node 0 is a token of the reply whose keys and values are not in the cache yet, the last one when the policy verifies;
    the others come after it. Nodes may be added, and fed, in several steps."""

    def __init__(self, held: Held, first: int):
        """
        Args:
            held: has pages for every position that nodes will have.
            first: position of node 0.
        """
        self.held, self.first = held, first
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.fed = 0
        """Nodes whose keys and values are known."""
        self._rows: dict[int, Float[Tensor, "nodes 2 kv_heads d"]] = {}
        """Keys and values by layer."""

    @staticmethod
    def after(held: Held, last: int, cache: KVCache, layer: int) -> Tree:
        """Whose node 0 is the reply's token at position `last`, that this layer of the cache has keys and values of: for
        trees without a common first token, to be fed to this layer only."""
        tree = Tree(held, last)
        tree.add([-1])
        tree.fed = 1
        page, offset, memories = held.pages[last // PAGE], last % PAGE, (cache.keys(layer), cache.values(layer))
        tree._rows[layer] = torch.stack([memory[page, :, offset] for memory in memories])[None]
        return tree

    def add(self, parents: list[int]) -> None:
        """More nodes, by the one that each comes after; -1 for node 0.

        Raises:
            ValueError: a node does not come after its parent.
        """
        for parent in parents:
            if not (0 <= parent < len(self.parents) or (parent == -1 and not self.parents)):
                raise ValueError(
                    f"node {len(self.parents)} cannot come after node {parent}: only node 0 has -1, and each other one an "
                    "earlier node; add them in that order"
                )
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)

    @property
    def count(self) -> int:
        """Nodes to feed in the next step."""
        return len(self.parents) - self.fed

    def path(self, node: int) -> list[int]:
        """The nodes from node 0 to this one."""
        found = [node]
        while (parent := self.parents[found[-1]]) >= 0:
            found.append(parent)
        return found[::-1]

    def store(self, layer: int, rows: Float[Tensor, "nodes 2 kv_heads d"], before: int) -> Tensor:
        """Keys and values of the nodes fed in this step, after `before` others; returns those of all."""
        if before:
            rows = torch.cat([self._rows[layer][:before], rows])
        self._rows[layer] = rows
        return rows

    def rows(self, layer: int, nodes: list[int]) -> Float[Tensor, "nodes 2 kv_heads d"]:
        """Keys and values of some nodes."""
        return self._rows[layer][nodes]

    @property
    def layers(self) -> list[int]:
        """The layers that it was fed to."""
        return list(self._rows)


def keep(kept: list[tuple[Tree, list[int]]], cache: KVCache) -> None:
    """The keys and values of these nodes of each tree, a path from node 0 on, become those of its reply's tokens, in
    every layer that they were computed for.

    Raises:
        ValueError: nodes that are no path from node 0, or that were not fed.
    """
    at, pages = [], []
    for tree, nodes in kept:
        if not nodes or tree.path(nodes[-1]) != nodes or max(nodes) >= tree.fed:
            raise ValueError(
                f"nodes {nodes} are no path of fed nodes from node 0 on, of {tree.fed} with parents {tree.parents}; keep "
                "what was verified, after the step"
            )
        places = np.arange(tree.first, tree.first + len(nodes))
        at.append(places)
        pages.append(np.asarray(tree.held.pages)[places // PAGE])
    if not kept:
        return
    where = torch.from_numpy(np.concatenate(pages)), torch.from_numpy(np.concatenate(at) % PAGE)
    for layer in kept[0][0].layers:
        cache.write(layer, *where, torch.cat([tree.rows(layer, nodes) for tree, nodes in kept]))


class TreePart:
    """The trees of one step whose new nodes fill tiles of one width. They count as fed from here on."""

    def __init__(self, trees: list[Tree], starts: list[int], cache: KVCache):
        """
        Args:
            starts: which of the step's tokens each tree's new nodes begin with.
        """
        self._cache = cache
        self._trees = [(tree, start, tree.fed, tree.count) for tree, start in zip(trees, starts, strict=True)]
        width = width_of(trees[0].count)
        laid = [_laid(tree, width) for tree in trees]
        counts = np.array([len(one.pages) for one in laid])
        first_pairs = np.cumsum(counts) - counts
        nodes = np.array([len(tree.parents) for tree in trees])
        first_nodes = np.cumsum(nodes) - nodes
        pairs = np.concatenate([one.own[0] + at for one, at in zip(laid, first_pairs, strict=True)])
        rows = np.concatenate([one.own[2] + at for one, at in zip(laid, first_nodes, strict=True)])
        self._pairs, self._rows = torch.from_numpy(pairs), torch.from_numpy(rows)
        self._offsets = torch.from_numpy(np.concatenate([one.own[1] for one in laid]))
        most = np.arange(counts.max())
        place = [np.minimum(np.arange(width), tree.count - 1) for tree in trees]
        self.tiles = Tiles(
            tokens=np.concatenate([at + np.arange(tree.count) for at, tree in zip(starts, trees, strict=True)]),
            table=torch.from_numpy(np.concatenate([at + some for at, some in zip(starts, place, strict=True)])),
            valid=torch.from_numpy(np.concatenate([i * width + np.arange(t.count) for i, t in enumerate(trees)])),
            width=width,
            rows=torch.from_numpy(np.repeat(np.arange(len(trees)), counts)),
            pages=torch.from_numpy(np.concatenate([one.pages for one in laid])),
            hidden=torch.from_numpy(np.concatenate([one.hidden for one in laid]))[:, None],
            bags=torch.arange(int(counts.sum())),
            starts=torch.from_numpy(first_pairs),
            grid=torch.from_numpy((first_pairs[:, None] + np.where(most < counts[:, None], most, 0)).ravel())
            if len(most) > 1
            else None,
        )
        for tree in trees:
            tree.fed = len(tree.parents)

    def attend(
        self, layer: int, queries: Float[Tensor, "tokens kv_heads group d"], rows: Float[Tensor, "tokens 2 kv_heads d"]
    ) -> Float[Tensor, "n kv_heads group d"]:
        """
        Args:
            queries, rows: of all the step's tokens.
        """
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        stored = [
            tree.store(layer, rows[start : start + count].to(keys.dtype), before)
            for tree, start, before, count in self._trees
        ]
        own = torch.cat(stored).index_select(0, self._rows)
        pages = self.tiles.pages
        keys, values = keys.index_select(0, pages), values.index_select(0, pages)
        keys[self._pairs, :, self._offsets], values[self._pairs, :, self._offsets] = own[:, 0], own[:, 1]
        return attend(queries, keys, values, self.tiles)


@dataclass(frozen=True)
class _Laid:
    """What the new nodes of one tree see: the reply's whole pages, then for each path copies of those that it ends in."""

    pages: Int[np.ndarray, " pairs"]
    hidden: Float[np.ndarray, "pairs width page"]
    own: tuple[Int[np.ndarray, " places"], Int[np.ndarray, " places"], Int[np.ndarray, " places"]]
    """Pair and offset of each place of a copied page that is a node's own, and the node."""


def _laid(tree: Tree, width: int) -> _Laid:
    whole, total = tree.first // PAGE, len(tree.parents)
    positions = tree.first + np.array(tree.depths)
    with_children = set(tree.parents)
    paths = [tree.path(node) for node in range(tree.fed, total) if node not in with_children]
    path_of = np.full(total, -1)
    pairs, offsets, nodes, pages, owners, ordinals = (
        [],
        [],
        [],
        list(tree.held.pages[:whole]),
        [-1] * whole,
        [0] * whole,
    )
    for number, path in enumerate(paths):
        path_of[path] = number
        places = positions[path]
        pairs.append(len(pages) + places // PAGE - whole)
        offsets.append(places % PAGE)
        nodes.append(path)
        mine = range(whole, places[-1] // PAGE + 1)
        pages += [tree.held.pages[ordinal] for ordinal in mine]
        owners += [number] * len(mine)
        ordinals += mine
    new = np.minimum(tree.fed + np.arange(width), total - 1)
    seen = np.arange(PAGE) <= (positions[new] - np.array(ordinals)[:, None] * PAGE)[..., None]
    owner = np.array(owners)[:, None]
    seen = np.where((owner < 0)[..., None], True, seen & (owner == path_of[new])[..., None])
    hidden = np.where(seen, np.float32(0.0), np.float32(-np.inf))
    return _Laid(np.array(pages), hidden, (np.concatenate(pairs), np.concatenate(offsets), np.concatenate(nodes)))
