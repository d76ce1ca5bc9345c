"""What a draft learns from in one micro-batch of one rank: its documents, and the policy's hidden states in their rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.kernels.layout import Rows
from furlong.ops.draft.inputs import DraftInputs
from furlong.resources.trainers.draft_taps import documents
from furlong.resources.trainers.draft_trainer import DraftTrainer
from furlong.resources.trainers.megatron.draft_taps import Tapped
from furlong.resources.trainers.megatron.feed import Feed


def draft_inputs(
    feed: Feed, tapped: Tapped, draft: DraftTrainer, temperature: float
) -> tuple[DraftInputs, Float[Tensor, "known hidden"]] | None:
    """A prefix tree's documents one after the other, or a line as it lies on its ranks, which call this together; None
    where there is none, on all of them.

    Args:
        temperature: of the rollout.
    Returns:
        the rows, and an embedding for them: tokens are numbered by where its outputs lie, so that the policy's own, which
        is on another stage or cut over ranks, is not needed.
    """
    index, rows, trained, owners = documents(feed) if feed.layout is None else _line(feed)
    if not owners:
        return None
    start, embedded = 0, tapped.embedded[index]
    if feed.ring is not None:
        parts = [torch.empty_like(embedded) for _ in range(feed.ring.ranks)]
        dist.all_gather(parts, embedded, group=feed.ring.group)
        start, embedded = feed.ring.rank * len(index), torch.cat(parts)
    inputs = DraftInputs(
        rows=rows,
        tokens=torch.arange(start, start + len(index), device=index.device),
        taps=tapped.taps[index],
        final=tapped.final[index],
        trained=trained,
        temperature=temperature,
        offsets=draft.offsets(owners),
    )
    return inputs, embedded


def _line(feed: Feed) -> tuple[Int[Tensor, " rows"], Rows, Bool[Tensor, " rows"], list[int]]:
    """As `documents`; trajectories are those of the whole line."""
    trained = torch.zeros(feed.tokens.numel(), dtype=torch.bool, device=feed.tokens.device)
    trained[feed.places] = True
    index = torch.arange(len(trained), device=trained.device)
    return index, Rows(feed.documents[0], feed.positions[0]), trained, feed.owners.tolist()
