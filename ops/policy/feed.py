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
    """A draft's tokens after its last one."""
    laws: list[Float[Tensor, "blocks n"]] = field(default_factory=list)
    """The chances that each was drawn from, over the draft's vocabulary, where they are needed."""
    withdrawn: bool = False
    """Nothing of it counts as fed."""

    @property
    def total(self) -> int:
        return self.count + len(self.proposals)

    @property
    def ready(self) -> bool:
        """Whether a token can be drawn afterwards."""
        return self.reply.left == self.count

    @property
    def tokens(self) -> list[int]:
        first = self.reply.fed
        return [*self.reply.tokens[first : first + self.count], *self.proposals]


def drawn(
    feeds: list[Feed], logits: Float[Tensor, "rows vocab"], rule: str, ids: Int[Tensor, " draft_vocab"] | None
) -> list[list[Token]]:
    """For each reply the proposals that are kept, and the token after them. Where a log-probability is NaN, the model's
    logits were not finite.

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
    counts = [len(feed.proposals) for feed in feeds]
    most = max(counts)
    proposed = Proposed.chains(
        torch.tensor([[*feed.proposals, *[-1] * (most - len(feed.proposals))] for feed in feeds]), torch.tensor(counts)
    )
    numbers = Numbers.of(seeds_of(requests), positions, proposed)
    if rule == "match":
        kept = match(logits, rules_of(requests), proposed, numbers)
    else:
        laws = torch.stack([law for feed in feeds for law in feed.laws])
        rows = torch.where(torch.arange(most + 1) < torch.tensor(counts)[:, None], 0, -1)
        rows[rows == 0] = torch.arange(len(laws))
        kept = rejection(logits, rules_of(requests), proposed, numbers, Drafted(laws, rows, ids))
    columns = (kept.tokens.tolist(), kept.logprobs.tolist(), kept.model_logprobs.tolist())
    rows = [list(zip(*row, strict=True)) for row in zip(*columns, strict=True)]
    return [row[: accepted + 1] for row, accepted in zip(rows, kept.accepted.tolist(), strict=True)]


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
