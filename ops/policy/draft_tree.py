"""A draft's tree of proposals: several tokens after each of a level's likeliest nodes, level by level."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.verify import propose_stream
from furlong.ops.policy.draft_chain import DraftChain
from furlong.ops.policy.feed import Feed, rules_of, seeds_of
from furlong.ops.policy.kv_cache import KVCache
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.sampling import Laws, laws_of, uniforms
from furlong.ops.policy.tree_attention import Tree


def nodes_of(width: int, depth: int) -> int:
    """Proposals of a tree at most: `width` after each of the `width` nodes of every level that go on; of a chain, depth."""
    return width + (depth - 1) * width**2 if depth else 0


@dataclass(eq=False)
class _Grown:
    """One reply's tree under way."""

    feed: Feed
    room: int
    """Levels it may have."""
    rows: Tree
    """The draft's rows of the nodes that go on: row 0 is of the reply's last token, those of the others follow from it."""
    parents: list[int] = field(default_factory=lambda: [-1])


@dataclass(eq=False)
class _Node:
    grown: _Grown
    number: int
    """Among the nodes that the policy verifies."""
    row: int
    """Among the draft's; its parent's until it has one."""
    state: int
    """Which of the hidden states computed last is that row's."""
    token: int = -1
    others: int = 0
    """How many on its path are not the first child, which is the likeliest to be kept."""
    chance: float = 1.0


class DraftTree:
    """By one weights version. A tree's shape is a lossless one for `rejection` (see `ops.draft.verify`): whether a node goes
    on is settled by its level, before anything after it is drawn, and its children are independent draws. With `match`,
    where any proposals will do, they are different tokens: the one that is drawn with the policy's number, then
    the likeliest others."""

    def __init__(self, live: Live, cache: KVCache, coupled: bool, width: int):
        """
        Args:
            coupled: see `DraftChain`.
            width: children of a node, and nodes of a level that go on.
        """
        self._drafter: Drafter = live.drafter
        self._decoder, self._cache, self._coupled, self._width = live.decoder, cache, coupled, width
        self._chain = DraftChain(live, cache, coupled)

    def follow(self, replies: list[Reply], keep: int) -> Float[Tensor, "replies hidden"]:
        """See `DraftChain.follow`."""
        return self._chain.follow(replies, keep)

    def propose(self, asked: list[tuple[Feed, int]], hidden: Float[Tensor, "asked hidden"]) -> None:
        """Give each a tree of so many levels.

        Args:
            hidden: of each reply's last row.
        """
        layer = self._cache.layers
        grown = [
            _Grown(feed, room, Tree.after(feed.reply.held, feed.reply.fed - 1, self._cache, layer))
            for feed, room in asked
        ]
        going, depth = [_Node(one, 0, 0, state) for state, one in enumerate(grown)], 0
        while going:
            found = self._children(going, hidden, depth)
            depth += 1
            going = self._going(found, depth)
            if going:
                hidden = self._run(going, hidden)
        for one in grown:
            one.feed.tree = Tree(one.feed.reply.held, one.feed.reply.fed)
            one.feed.tree.add(one.parents)

    def _children(self, going: list[_Node], hidden: Tensor, depth: int) -> list[_Node]:
        """Draw those of every node that goes on; those that may go on in their turn."""
        requests = [node.grown.feed.reply.request for node in going]
        laws = laws_of(self._drafter.logits(hidden), rules_of(requests))
        positions = np.array([node.grown.feed.reply.position + depth for node in going])
        places = self._drawn(laws, seeds_of(requests), positions)
        shares = laws.chances.flatten(1).gather(1, places.clamp(min=0)) / laws.mass[:, None]
        # Where logits are not finite a token means nothing, and may be none.
        ids = self._drafter.ids[places.clamp(0, len(self._drafter.ids) - 1)].tolist()
        rows = zip(going, ids, places.tolist(), shares.nan_to_num().tolist(), strict=True)
        return [child for state, row in enumerate(rows) for child in self._added(*row, laws.chances[state])]

    def _added(self, node: _Node, ids: list[int], places: list[int], shares: list[float], law: Tensor) -> list[_Node]:
        feed, found, seen = node.grown.feed, [], set()
        if not self._coupled:
            feed.laws.append(law)
            feed.sources.append(node.number)
        for child, (token, place, share) in enumerate(zip(ids, places, shares, strict=True)):
            if place < 0:
                continue
            feed.proposals.append(token)
            node.grown.parents.append(node.number)
            # What is drawn again after it was rejected is never kept.
            if token not in seen:
                number, others = len(feed.proposals), node.others + (child > 0)
                found.append(_Node(node.grown, number, node.row, node.state, token, others, node.chance * share))
            seen.add(token)
        return found

    def _drawn(self, laws: Laws, seeds: np.ndarray, positions: Int[np.ndarray, " rows"]) -> Int[Tensor, "rows width"]:
        """Children of each row in the draft's vocabulary; -1 where there are fewer."""
        streams = [0 if self._coupled else propose_stream(0), *map(propose_stream, range(1, self._width))]
        drawn = [laws.draw(torch.from_numpy(uniforms(seeds, positions, stream))) for stream in streams]
        # Greedy rows draw one token only.
        differ = laws.likeliest >= 0
        if self._coupled or differ.all():
            return self._different(laws, drawn[0])
        return torch.where(differ[:, None], self._different(laws, drawn[0]), torch.stack(drawn, dim=1))

    def _different(self, laws: Laws, first: Int[Tensor, " rows"]) -> Int[Tensor, "rows width"]:
        rest = laws.chances.flatten(1).scatter(1, first[:, None], 0.0)
        shares, places = rest.topk(min(self._width - 1, rest.shape[1]))
        others = F.pad(torch.where(shares > 0, places, -1), (0, self._width - 1 - places.shape[1]), value=-1)
        return torch.cat([first[:, None], others], dim=1)

    def _going(self, found: list[_Node], depth: int) -> list[_Node]:
        """Of each reply's, those likeliest to be kept."""
        going = []
        for grown, nodes in groupby(found, key=lambda node: node.grown):
            if depth < grown.room:
                going += sorted(nodes, key=lambda node: (node.others, -node.chance))[: self._width]
        return going

    def _run(self, going: list[_Node], hidden: Tensor) -> Float[Tensor, "going hidden"]:
        """Compute their rows."""
        before = hidden[[node.state for node in going]]
        for state, node in enumerate(going):
            node.grown.rows.add([node.row])
            node.row, node.state = len(node.grown.rows.parents) - 1, state
        plan = Plan([], self._cache, list(dict.fromkeys(node.grown.rows for node in going)))
        embedded = self._decoder.embed(torch.tensor([node.token for node in going]))
        return self._drafter.run(embedded, before, plan, self._cache.layers)
