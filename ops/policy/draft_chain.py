"""A draft's forward passes over replies: what they were found to say, then one proposal after the other."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.verify import propose_stream
from furlong.ops.policy.feed import Feed, rules_of, seeds_of
from furlong.ops.policy.kv_cache import KVCache
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.sampling import laws_of, uniforms


class DraftChain:
    """By one weights version."""

    def __init__(self, live: Live, cache: KVCache, coupled: bool):
        """
        Args:
            coupled: proposals are drawn with the numbers that the policy draws with, else with their own, and what they
                are drawn from is kept for whoever accepts them.
        """
        self._drafter: Drafter = live.drafter
        self._decoder, self._cache, self._coupled = live.decoder, cache, coupled

    def follow(self, replies: list[Reply], keep: int) -> Float[Tensor, "replies hidden"]:
        """Compute the rows of what waits, but the last `keep` positions; the hidden state of each reply's last row.

        Args:
            replies: those with a single row to compute come first; each has one.
        """
        spans, tokens, features = [], [], []
        for reply in replies:
            first = reply.draft.count
            features.append(reply.draft.take(keep))
            spans.append(Span(reply.held, first, reply.draft.count - first))
            tokens += reply.tokens[first + 1 : reply.draft.count + 1]
        hidden = self._run(torch.tensor(tokens), torch.cat(features), spans)
        return hidden[np.cumsum([span.count for span in spans]) - 1]

    def propose(self, asked: list[tuple[Feed, int]], hidden: Float[Tensor, "asked hidden"]) -> None:
        """Give each as many proposals.

        Args:
            hidden: of each reply's last row.
        """
        depth = 0
        while True:
            tokens = self._drawn([feed for feed, _ in asked], hidden, depth)
            depth += 1
            going = [place for place, (_, room) in enumerate(asked) if room > depth]
            if not going:
                return
            asked = [asked[place] for place in going]
            spans = [Span(feed.reply.held, feed.reply.fed + depth - 1, 1) for feed, _ in asked]
            hidden = self._run(tokens[going], hidden[going], spans)

    def _drawn(self, feeds: list[Feed], hidden: Tensor, depth: int) -> Tensor:
        requests = [feed.reply.request for feed in feeds]
        laws = laws_of(self._drafter.logits(hidden), rules_of(requests))
        positions = np.array([feed.reply.position + depth for feed in feeds])
        stream = 0 if self._coupled else propose_stream(0)
        places = laws.draw(torch.from_numpy(uniforms(seeds_of(requests), positions, stream)))
        # Where logits are not finite a token means nothing, and may be none.
        tokens = self._drafter.ids[places.clamp(max=len(self._drafter.ids) - 1)]
        for row, (feed, token) in enumerate(zip(feeds, tokens.tolist(), strict=True)):
            feed.proposals.append(token)
            if not self._coupled:
                feed.laws.append(laws.chances[row])
        return tokens

    def _run(self, tokens: Tensor, hidden: Tensor, spans: list[Span]) -> Float[Tensor, "rows hidden"]:
        plan = Plan(spans, self._cache)
        return self._drafter.run(self._decoder.embed(tokens), hidden, plan, self._cache.layers)
