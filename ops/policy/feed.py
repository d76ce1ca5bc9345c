"""What a step is fed of each reply, and the tokens that are drawn from its logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from furlong.ops.draft.proposed import Drafted, Proposed
from furlong.ops.draft.verify import Numbers, match, rejection
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.sampling import Rules, draw, uniforms
from furlong.ops.policy.tree_attention import Tree
from furlong.ops.protocols import GenerateRequest

Token = tuple[int, float, float]
"""With its log-probability, and the model's own."""


@dataclass(eq=False)
class Feed:
    """What a step is fed of one reply."""

    reply: Reply
    count: int
    """Its own next tokens."""
    proposals: list[int] = field(default_factory=list)
    """A draft's tokens after its last one, which is node 0 of those below."""
    tree: Tree | None = None
    """Its last token and the proposals, where they are no chain."""
    laws: list[Float[Tensor, "blocks n"]] = field(default_factory=list)
    """The chances that proposals were drawn from, over the draft's vocabulary, where they are needed."""
    sources: list[int] = field(default_factory=list)
    """The node whose children were drawn from each of them; of a chain, all in order if empty."""
    withdrawn: bool = False
    """Nothing of it counts as fed."""
    path: list[int] = field(default_factory=lambda: [0])
    """Once tokens are drawn: node 0 and those of the proposals that are kept, in order."""

    @property
    def total(self) -> int:
        return self.count + len(self.proposals)

    @property
    def ready(self) -> bool:
        """Whether a token can be drawn afterwards."""
        return self.reply.left == self.count

    @property
    def depth(self) -> int:
        """Most proposals that can be kept."""
        return max(self.tree.depths) if self.tree else len(self.proposals)

    @property
    def parents(self) -> list[int]:
        """The node that each one comes after; -1 for node 0."""
        return self.tree.parents if self.tree else list(range(-1, len(self.proposals)))

    def rows(self, count: int) -> slice | list[int]:
        """Which of its tokens in the step are the first `count` that stay: its own, then the proposals kept."""
        return self.path[:count] if self.tree else slice(count)

    @property
    def tokens(self) -> list[int]:
        first = self.reply.fed
        return [*self.reply.tokens[first : first + self.count], *self.proposals]


def drawn(
    feeds: list[Feed], logits: Float[Tensor, "rows vocab"], rule: str, ids: Int[Tensor, " draft_vocab"] | None
) -> list[list[Token]]:
    """For each reply the proposals that are kept, and the token after them; each feed's `path` is set. Where a
    log-probability is NaN, the model's logits were not finite.

    Args:
        feeds: of replies that are ready.
        logits: after the last own token and the proposals of each.
        rule: see `DraftSettings.verify`.
        ids: the policy's id of each token of the draft.
    """
    requests = [feed.reply.request for feed in feeds]
    positions = np.array([feed.reply.position for feed in feeds])
    if not any(feed.proposals for feed in feeds):
        found = draw(logits, rules_of(requests), torch.from_numpy(uniforms(seeds_of(requests), positions)))
        columns = (found.tokens.tolist(), found.logprobs.tolist(), found.model_logprobs.tolist())
        return [[token] for token in zip(*columns, strict=True)]
    proposed = _proposed(feeds)
    numbers = Numbers.of(seeds_of(requests), positions, proposed)
    if rule == "match":
        kept = match(logits, rules_of(requests), proposed, numbers)
    else:
        kept = rejection(logits, rules_of(requests), proposed, numbers, _drafted(feeds, ids))
    columns = (kept.tokens.tolist(), kept.logprobs.tolist(), kept.model_logprobs.tolist())
    rows = [list(zip(*row, strict=True)) for row in zip(*columns, strict=True)]
    counts = [accepted + 1 for accepted in kept.accepted.tolist()]
    for feed, nodes, count in zip(feeds, kept.nodes.tolist(), counts, strict=True):
        feed.path = nodes[:count]
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def _proposed(feeds: list[Feed]) -> Proposed:
    counts = [len(feed.proposals) for feed in feeds]
    most = max(counts)
    tokens = torch.tensor([[*feed.proposals, *[-1] * (most - len(feed.proposals))] for feed in feeds])
    if not any(feed.tree for feed in feeds):
        return Proposed.chains(tokens, torch.tensor(counts))
    parents = torch.tensor([[*feed.parents, *[-1] * (most - len(feed.proposals))] for feed in feeds])
    return Proposed(torch.cat([torch.full((len(feeds), 1), -1), tokens], dim=1), parents)


def _drafted(feeds: list[Feed], ids: Int[Tensor, " draft_vocab"] | None) -> Drafted:
    laws = torch.stack([law for feed in feeds for law in feed.laws])
    rows, first = np.full((len(feeds), 1 + max(len(feed.proposals) for feed in feeds)), -1), 0
    for row, feed in zip(rows, feeds, strict=True):
        row[feed.sources or range(len(feed.laws))] = first + np.arange(len(feed.laws))
        first += len(feed.laws)
    return Drafted(laws, torch.from_numpy(rows), ids)


def rules_of(requests: list[GenerateRequest]) -> Rules:
    """How each request's tokens are drawn."""
    return Rules(
        temperatures=np.array([request.temperature for request in requests], dtype=np.float32),
        top_k=np.array([request.top_k for request in requests]),
        top_p=np.array([request.top_p for request in requests]),
        min_p=np.array([request.min_p for request in requests]),
    )


def seeds_of(requests: list[GenerateRequest]) -> UInt64[np.ndarray, " requests"]:
    return np.array([request.seed for request in requests], dtype=np.uint64)
