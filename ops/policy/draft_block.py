"""A block drafter's passes over replies: what they were found to say, then all proposals at once."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from furlong.ops.draft.block_drafter import BlockDrafter
from furlong.ops.draft.verify import propose_stream
from furlong.ops.policy.feed import Feed, rules_of, seeds_of
from furlong.ops.policy.kv_cache import PAGE, KVCache
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.row_bits import ALIGNED
from furlong.ops.policy.sampling import laws_of, uniforms


class DraftBlock:
    """By one weights version."""

    def __init__(self, live: Live, cache: KVCache, coupled: bool):
        """
        Args:
            coupled: see `DraftChain`.
        """
        self._drafter: BlockDrafter = live.drafter
        self._decoder, self._cache, self._coupled = live.decoder, cache, coupled

    def follow(self, replies: list[Reply], keep: int) -> None:
        """Store keys and values of what waits, but of the last `keep` positions."""
        features, positions, pages = [], [], []
        for reply in replies:
            first = reply.draft.count
            features.append(reply.draft.take(keep))
            at = np.arange(first, reply.draft.count)
            positions.append(at)
            pages.append(np.array(reply.held.pages)[at // PAGE])
        where = np.concatenate(positions)
        places = torch.from_numpy(np.concatenate(pages)), torch.from_numpy(where % PAGE)
        for layer, heads in enumerate(self._drafter.keys(torch.cat(features), torch.from_numpy(where))):
            rows = F.pad(heads, (0, -heads.shape[-1] % ALIGNED))
            self._cache.write(self._cache.layers + layer, *places, rows.view(len(rows), 2, -1, rows.shape[-1]))

    def propose(self, asked: list[tuple[Feed, int]], hidden: None) -> None:
        """Give each as many proposals, the first ones of a whole block: what a slot says depends on those after it, so
        that it says the same however many are wanted."""
        slots = self._drafter.shape.block
        plan = Plan([Span(feed.reply.held, feed.reply.fed, slots, whole=True) for feed, _ in asked], self._cache)
        anchors = self._decoder.embed(torch.tensor([feed.reply.tokens[-1] for feed, _ in asked]))
        found = self._drafter.run(anchors, plan, self._cache.layers)
        states = torch.cat([mine[:room] for mine, (_, room) in zip(found, asked, strict=True)])
        self._draw(asked, states)

    def _draw(self, asked: list[tuple[Feed, int]], states: Float[Tensor, "rows hidden"]) -> None:
        requests = [feed.reply.request for feed, room in asked for _ in range(room)]
        laws = laws_of(self._drafter.logits(states), rules_of(requests))
        positions = np.array([feed.reply.position + depth for feed, room in asked for depth in range(room)])
        stream = 0 if self._coupled else propose_stream(0)
        places = laws.draw(torch.from_numpy(uniforms(seeds_of(requests), positions, stream)))
        # Where logits are not finite a token means nothing, and may be none.
        tokens, start = self._drafter.ids[places.clamp(max=len(self._drafter.ids) - 1)].tolist(), 0
        for feed, room in asked:
            feed.proposals = tokens[start : start + room]
            if not self._coupled:
                feed.laws = list(laws.chances[start : start + room])
            start += room
