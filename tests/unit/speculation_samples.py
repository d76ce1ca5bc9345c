"""Policies with drafts of every quality, and batches that draw with and without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from furlong.ops.draft.block_drafter import BlockDrafter
from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.start import start_draft
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.draft_chain import DraftChain
from furlong.ops.policy.live import Live
from furlong.ops.policy.reply import Reply
from furlong.ops.protocols import GenerateRequest

VOCABULARY = 131
KINDS = {
    "llama": Architecture("llama", VOCABULARY, 48, 3, 6, 2, 8, 80, 1e-5, 1e4, 1024, True),
    "qwen3": Architecture("qwen3", VOCABULARY, 48, 3, 6, 2, 16, 80, 1e-5, 1e4, 1024, False),
    "moe": Architecture(
        "qwen3_moe", VOCABULARY, 48, 3, 6, 2, 16, 80, 1e-5, 1e4, 1024, False, 7, 3, 20, True, (0, 2)
    ),
}  # fmt: skip
ALWAYS = DraftSettings(verify="match", adaptive=False, shadow=0.0)


@cache
def weights(kind: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape, generator=draw) * 0.2).to(dtype)
        for name, shape in KINDS[kind].shapes().items()
    }


def live(
    kind: str = "llama", dtype: torch.dtype = torch.float32, settings: DraftSettings | None = None, version: int = 0,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
) -> Live:  # fmt: skip
    """One version, whose weights are seeded by its number, with the draft that starts beside it if there are settings."""
    arch, tensors = KINDS[kind], change(dict(weights(kind, dtype, version)))
    drafter = None
    if settings is not None:
        made, shape = start_draft(settings, arch, tensors, 0)
        drafter = (BlockDrafter if shape.kind == "block" else Drafter)(shape, made, dtype)
    return Live(version, Decoder(arch, tensors), serial=version + 1, drafter=drafter)


def requests(count: int, seed: int, new: tuple[int, ...] = (1, 2, 5, 40, 80)) -> list[GenerateRequest]:
    """Groups with one prompt, single ones, long and short; every way of drawing; tokens to stop at."""
    rng = random.Random(seed)
    found: list[GenerateRequest] = []
    while len(found) < count:
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 9, 63, 64, 65, 140])))
        for _ in range(rng.choice([1, 1, 3])):
            rules = {"top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 0.8]), "min_p": rng.choice([0.0, 0.05])}
            heat = rng.choice([1.0, 1.0, 0.7, 0.0])
            stops = rng.choice([(), (7, 40, 90)])
            found.append(
                GenerateRequest(
                    f"{seed}.{len(found)}", prompt, rng.getrandbits(60), rng.choice(new), heat, **rules, stop_ids=stops
                )
            )
    return found[:count]


def told(reply: Reply, reason: str, arch: Architecture) -> tuple:
    """Everything that is said of a reply."""
    sample = reply.sample(reason, arch, 0.0)
    return sample.tokens, sample.logprobs, sample.model_logprobs, sample.versions, reason, sample.routing


def run(
    asked: list[GenerateRequest], weights: Live, settings: DraftSettings | None, burst: int = 0,
    turns: Callable[[int, Batch], tuple[Live, bool]] | None = None,
) -> tuple[dict[str, tuple], Batch, int]:  # fmt: skip
    """What is said of each reply, the batch, and how many turns it took.

    Args:
        burst: requests that join per turn; all at once if 0.
        turns: what a turn is to be taken with, and whether keys and values are computed again.
    """
    arch = weights.decoder.architecture
    batch, left, found, count = Batch(arch, arch, True, settings), list(asked), {}, 0
    while left or batch.size:
        joining, left = (left[:burst], left[burst:]) if burst else (left, [])
        now, retract = turns(count, batch) if turns else (weights, False)
        ended = batch.turn(Turn(tuple(joining), retract=retract), now)
        assert not ended.broken
        found |= {reply.request.request_id: told(reply, reason, arch) for reply, reason in ended.replies}
        count += 1
        assert count < 5000
    return found, batch, count


def recorded(monkeypatch, replies: dict[str, tuple], wrong: float, seed: int = 0) -> None:
    """Have drafts propose what was drawn before, but for a share of the tokens."""
    rng = random.Random(seed)

    def propose(self: DraftChain, asked: list, hidden: Tensor) -> None:
        for feed, room in asked:
            start = feed.reply.position
            known = replies[feed.reply.request.request_id][0][start : start + room]
            known = [*known, *[0] * (room - len(known))]
            feed.proposals = [rng.randrange(VOCABULARY) if rng.random() < wrong else token for token in known]

    monkeypatch.setattr(DraftChain, "propose", propose)
